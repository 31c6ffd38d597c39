"""The model side of chunk reuse: loads stored KV, and computes selected tokens only."""
