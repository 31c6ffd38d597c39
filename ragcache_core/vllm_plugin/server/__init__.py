"""vLLM's OpenAI-compatible server with RAGCache's routes and checks."""
