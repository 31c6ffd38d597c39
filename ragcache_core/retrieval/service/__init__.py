"""A document store behind HTTP: the server, and the store that asks it."""
