"""Requests with a deadline for their first token: what their engine says, and how they are planned."""
