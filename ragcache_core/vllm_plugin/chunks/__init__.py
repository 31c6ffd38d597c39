"""Reuse of a document's KV at any position (Cache-Craft), as a connector of vLLM."""
