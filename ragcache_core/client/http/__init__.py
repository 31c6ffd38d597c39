"""HTTP that survives the death of an engine, and its errors."""
