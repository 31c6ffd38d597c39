"""vLLM's OpenAI-compatible server with routes and checks of ours."""
