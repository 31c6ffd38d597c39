"""Saved measurements of a model: prefill times, and the quality of chunk reuse."""
