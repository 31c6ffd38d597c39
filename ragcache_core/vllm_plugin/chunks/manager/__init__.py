"""Which chunks are kept, where they are, and which of them give way."""
