"""Checks of a whole engine on a device: what a CPU cannot show."""
