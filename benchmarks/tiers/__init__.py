"""What the tiers bring and cost."""
