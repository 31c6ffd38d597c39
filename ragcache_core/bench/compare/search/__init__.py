"""The search in front of the requests of ``ragcache bench --search``: vectors, their index, questions, one search."""
