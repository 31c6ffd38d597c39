"""Convert a framework's messages to a prompt whose documents the engine knows."""
