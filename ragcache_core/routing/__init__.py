"""Chooses a fleet's replica for a request, without clock and sockets, so that the simulator runs the same code."""
