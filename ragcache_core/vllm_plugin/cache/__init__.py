"""The cache of one engine: its knowledge tree, its requests, and what is told of both."""
