"""Requirements of chunk reuse on a model: its layers, its rotary embedding, its KV layout."""
