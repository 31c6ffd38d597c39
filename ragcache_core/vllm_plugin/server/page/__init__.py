"""The page at ``/ragcache``: its files, and its additional routes."""
