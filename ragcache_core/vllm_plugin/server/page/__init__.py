"""The page at ``/ragcache``: its files, and the routes beside the statistics that it shows."""
