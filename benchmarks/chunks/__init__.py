"""Savings and cost of chunk reuse."""
