"""The tiers below host memory: one interface for disk, shared store and vLLM's own tiers."""
