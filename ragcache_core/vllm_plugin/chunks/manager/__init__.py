"""Which chunks are stored, in which tiers, and which are evicted."""
