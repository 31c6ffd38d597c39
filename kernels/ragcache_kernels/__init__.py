"""The shelf for kernels. Nothing stands on it yet."""
