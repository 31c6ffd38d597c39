"""Staged indices over Faiss."""
