"""Search and prefill at the same time: reads the stages of a search, and starts speculative requests."""
