"""Processor time of the scheduler's thread: plain vLLM, vLLM's offloading and RAGCache, side by side, without a model."""
