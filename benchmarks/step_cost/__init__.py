"""Processor time of the scheduler's thread without a model: plain vLLM, vLLM's offloading and RAGCache compared."""
