"""Checks of whole engines on a GPU."""
