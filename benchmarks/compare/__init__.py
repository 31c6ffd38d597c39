"""``ragcache bench`` with LMCache, and simulations of its runs."""
