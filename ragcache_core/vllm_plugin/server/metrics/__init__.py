"""The figures on `/metrics`: their series, and how they are kept."""
