"""Build, check and time the kernels that lie beside this file, installed or not: ``python kernels/gpu_check.py``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the measurements are no part of the wheel

from benchmarks.kernels.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
