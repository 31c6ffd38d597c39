"""Chooses the replica of a fleet for a request; without clock and socket, so that the simulator runs the same code."""
