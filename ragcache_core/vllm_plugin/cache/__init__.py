"""The cache of one engine core: its knowledge tree, its requests, and the reports of both."""
