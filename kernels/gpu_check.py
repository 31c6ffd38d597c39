"""Build, check and time the kernels that lie beside this file, installed or not: ``python kernels/gpu_check.py``."""

import sys

from ragcache_kernels.check.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
