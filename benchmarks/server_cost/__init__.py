"""Processor time of a request in the API server and the engine core: plain vLLM, its offloading and RAGCache."""
