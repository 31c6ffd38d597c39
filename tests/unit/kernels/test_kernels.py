"""Every test of ``on_device`` passes in Triton's interpreter, and on a GPU where there is one; kernels compile."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

HERE = Path(__file__).resolve().parent
LEAST_TESTS = 40


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_kernels_pass_their_tests(where: str) -> None:
    environment = {**os.environ, "RAGCACHE_KERNELS_ON": where, "TRITON_INTERPRET": "1" if where == "cpu" else "0"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--confcutdir", str(HERE)]
    done = subprocess.run(
        [*command, str(HERE / "on_device")], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= LEAST_TESTS


def test_the_kernels_compile_for_gpus_that_are_not_here(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(HERE / "compiling.py")], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["rotate", "unrotate", "mass", "attention"]
