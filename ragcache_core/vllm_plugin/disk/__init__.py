"""The disk tier below vLLM's offloading."""
