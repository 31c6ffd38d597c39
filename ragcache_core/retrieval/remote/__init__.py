"""Stages of vector stores elsewhere, whose search cannot be cut."""
