"""Overlap of search and prefill, speculation, and the order of the queue."""
