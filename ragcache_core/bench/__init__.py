"""Measurements, each against its baseline in the same run: ``python -m ragcache_core.bench --help``."""
