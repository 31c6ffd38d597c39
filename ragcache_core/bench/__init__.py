"""Measurements, each against its baseline in the same run: ``python -m benchmarks --help``."""
