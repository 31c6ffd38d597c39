"""Cost of staged and filtered search."""
