"""The figures and tables of the RAGCache paper beside ours, in simulation: ``ragcache bench paper``."""
