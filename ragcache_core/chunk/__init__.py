"""Reuse of a chunk's KV at any position behind any prefix, as pure decisions (Cache-Craft)."""
