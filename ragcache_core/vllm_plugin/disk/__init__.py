"""The disk tier of vLLM's offloading."""
