"""Benchmarks of fleets: replicas in virtual time, on real engines, and what choosing one costs."""
