"""The machine of a measurement."""

from __future__ import annotations

import os
import platform
import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def machine() -> dict[str, str | int]:
    """Return processor, cores, commit and versions."""
    facts: dict[str, str | int] = {
        "processor": _processor(),
        "cores": os.cpu_count() or 1,
        "python": platform.python_version(),
        "commit": _commit(),
    }
    for name, package in (("ragcache", "ragcache"), ("faiss", "faiss-cpu")):
        with suppress(PackageNotFoundError):
            facts[name] = version(package)
    return facts


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for row in info.read_text(encoding="utf-8").splitlines():
            if row.startswith("model name"):
                return row.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _commit() -> str:
    try:
        asked = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
        return subprocess.run(asked, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
