"""The host tier: vLLM's offloading with RAGCache's policy."""
