"""The host tier: vLLM's offloading, with our policy."""
