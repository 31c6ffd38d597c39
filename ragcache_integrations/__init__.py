"""Integrations of RAGCache with LangChain and LlamaIndex; each needs its framework, which an extra installs."""
