"""Builds, checks and times the kernels on a GPU: ``python kernels/gpu_check.py``."""
