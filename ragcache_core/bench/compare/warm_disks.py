"""Disk tiers that were warmed once, copied before each engine: instead of the same warm-up again and again."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragcache_core.private_files import make_once

NUM_AWAKE = 50
"""Requests of the warm-up, its last, that an engine sees which begins with a warm disk: its other tiers are empty."""

_STILL_S, _PATIENCE_S = 2.0, 60.0


@dataclass(frozen=True, slots=True)
class WarmDisks:
    """A folder with a disk tier for each kind of engine and seed, as it is after the warm-up.

    ``facts`` are all that the requests and the tiers depend on: with others a tier is warmed anew.
    """

    folder: Path
    facts: Mapping[str, Any]

    def copied(self, name: str, seed: int, warm: Callable[[Path], object], to: Path) -> None:
        """Fill the folder ``to`` with the tier of an engine; the first time ``warm`` fills one.

        Raises:
            OSError: the disk is full, or cannot be written to.
        """
        named = json.dumps({**self.facts, "seed": seed}, sort_keys=True, default=str)
        digest = hashlib.sha256(named.encode()).hexdigest()[:16]
        kept = make_once(self.folder / f"{name}-{seed}-{digest}", warm)
        shutil.copytree(kept, to, dirs_exist_ok=True, copy_function=copy_sparse)


def wait_until_still(folder: Path) -> None:
    """Return when nothing was written below ``folder`` for two seconds, or after a minute."""
    until_s = time.monotonic() + _PATIENCE_S
    while time.time() - _written_s(folder) < _STILL_S and time.monotonic() < until_s:
        time.sleep(0.1)


def _written_s(folder: Path) -> float:
    newest = 0.0
    for path in folder.rglob("*"):
        with suppress(OSError):  # it was just removed
            newest = max(newest, path.stat().st_mtime)
    return newest


def copy_sparse(source: str, target: str) -> None:
    """Copy a file without its holes: a disk tier's file is as large as the tier, however little is in it.

    Raises:
        OSError: the disk is full, or cannot be written to.
    """
    with Path(source).open("rb") as read, Path(target).open("wb") as written:
        size, end = os.fstat(read.fileno()).st_size, 0
        os.truncate(written.fileno(), size)
        while end < size:
            try:
                start = os.lseek(read.fileno(), end, os.SEEK_DATA)
            except OSError:  # nothing but a hole is left
                break
            end = os.lseek(read.fileno(), start, os.SEEK_HOLE)
            os.lseek(written.fileno(), start, os.SEEK_SET)
            while start < end:
                start += os.sendfile(written.fileno(), read.fileno(), start, min(end - start, 1 << 30))
    shutil.copymode(source, target)
