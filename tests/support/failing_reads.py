"""Programs in which reads of a file fail as on a disk that cannot be read at the moment."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_LIBRARY_ENV = "RAGCACHE_TEST_FAILING_READS"


def run_with_failing_reads(program: str, *arguments: str | Path, tmp_path: Path) -> str:
    """Run a Python program that may call :func:`fail_reads`, and return what it prints."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    library = tmp_path / "failing_reads.so"
    source = Path(__file__).with_suffix(".c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    env = {**os.environ, "LD_PRELOAD": str(library), _LIBRARY_ENV: str(library)}
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def fail_reads(suffix: str, number: int, *, lasts: bool = False) -> None:
    """Let the ``number``-th read from now on of files whose paths end so fail with EIO; 0 ends that.

    One that ``lasts`` is followed by others.
    """
    _library().fail_reads(suffix.encode(), ctypes.c_long(number), int(lasts))


def _library() -> ctypes.CDLL:
    return ctypes.CDLL(os.environ[_LIBRARY_ENV])
