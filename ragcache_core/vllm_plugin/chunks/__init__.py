"""Chunk reuse (Cache-Craft): reuse of a document's KV at other positions, as a vLLM connector."""
