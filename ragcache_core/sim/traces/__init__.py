"""Traces of requests: read, written, generated, imported."""
