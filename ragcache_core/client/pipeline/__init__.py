"""Search and prefill at the same time: stages of a search in, one answer out."""
