"""The facts, read in a child process: importing vLLM takes seconds and sets process-wide state.

The installed release is read, or the one whose files ``make vllm-facts`` puts first in ``PYTHONPATH``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.conftest import ROOT

Since = Callable[..., list[str]]


@pytest.fixture(scope="session")
def all_facts() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.vllm_facts"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="session")
def release(all_facts: dict[str, Any]) -> str:
    """The release that is read, as ``0.33``; the one that ``make vllm-facts`` was asked for, if it was."""
    version = str(all_facts["engine"]["version"])
    assert version == os.environ.get("VLLM_FACTS_OF", version), "another vLLM came first in PYTHONPATH"
    return ".".join(version.split(".")[:2])


@pytest.fixture(scope="session")
def since(release: str) -> Since:
    """Names that a release has from a certain one on: ``[*since("0.33", "sync")]``."""
    is_newer = [int(part) for part in release.split(".")]
    return lambda first, *names: list(names) if is_newer >= [int(part) for part in first.split(".")] else []
