"""What chunk reuse must know of a model: its layers, its rotary embedding, its pages of KV."""
