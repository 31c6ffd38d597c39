"""RAGCache's plugin of vLLM: the only folder that imports vLLM, imported by the engine's processes alone."""
