"""The engine's statistics of its cache, per request and in total."""
