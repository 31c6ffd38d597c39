"""The model's side of chunk reuse: stored KV in, only selected tokens computed."""
