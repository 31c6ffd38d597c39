"""Requests that are sent before a search is over, and joined when they turn out right."""
