"""Policies, document orders and queues in virtual time."""
