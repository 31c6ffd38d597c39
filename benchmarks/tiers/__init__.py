"""Cached share, time to first token, exactness and cost of the tiers."""
