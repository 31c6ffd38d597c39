"""Recognition in an API server: registration, the wrapper of `generate`, and its journal."""
