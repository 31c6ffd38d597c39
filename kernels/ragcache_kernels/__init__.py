"""Triton kernels for the reuse of chunks at any position. Each comes with its naive PyTorch twin."""
