"""Staged search in external vector stores."""
