"""Figures and tables of the RAGCache and Cache-Craft papers, simulated: ``python -m benchmarks.papers``."""
