"""RAGCache at the doors of LangChain and LlamaIndex; each package needs its framework and is installed as an extra."""
