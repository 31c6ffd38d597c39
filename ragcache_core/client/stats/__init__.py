"""What the engine says of its cache, request by request and in sum."""
