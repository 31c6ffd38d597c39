"""Measurements for developers, each against its baseline."""
