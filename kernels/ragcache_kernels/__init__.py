"""Triton kernels for reusing a chunk's KV at any position (Cache-Craft §4), each with a PyTorch reference.

One operation, one file, imported by its name: ``from ragcache_kernels.rotate_into_cache import rotate_into_cache``.
This package itself imports nothing, and can be imported without Triton. docs/dev/kernels.md draws each operation;
``make gpu-check`` builds, checks and times them.
"""
