"""Kernels run in Triton's interpreter, or on a GPU, in a process of their own: see ``test_kernels.py``.

The interpreter is chosen while Triton is imported, for the whole process; engines of other tests must not inherit it.
"""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("RAGCACHE_KERNELS_ON") else ["on_device/*"]
