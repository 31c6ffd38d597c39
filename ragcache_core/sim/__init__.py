"""Simulator: RAGCache's tree, policies, queue and document orders in virtual time, over a trace of requests."""
