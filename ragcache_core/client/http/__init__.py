"""HTTP that survives the death of an engine, and says what went wrong."""
