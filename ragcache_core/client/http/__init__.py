"""HTTP that survives an engine crash, and its errors."""
