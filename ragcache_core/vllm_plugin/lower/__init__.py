"""The tiers below host memory: one interface for the disk, the shared store and vLLM's own tiers."""
