"""Recognition in an API server: registration, the wrapper of `generate`, and what is kept on disk."""
