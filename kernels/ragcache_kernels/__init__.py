"""Triton kernels for reusing a chunk's KV at any position (Cache-Craft §4), each beside its naive PyTorch twin.

One operation, one file, imported by its name: ``from ragcache_kernels.rotate_into_cache import rotate_into_cache``.
This package itself imports nothing, so that it can be asked for where Triton is not installed. docs/kernels.md draws
each operation; ``make gpu-check`` builds, checks and times them.
"""
