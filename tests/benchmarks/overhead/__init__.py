"""Staged retrieval and the engine's door against their baselines."""
