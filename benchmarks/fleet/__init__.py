"""Fleets in virtual time and on real engines."""
