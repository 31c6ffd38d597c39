"""Storage of chunks: host memory and disk."""
