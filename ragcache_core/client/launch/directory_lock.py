"""A cache directory's lock for each way of launching an engine: what is taken is known before a model is loaded.

Two engines must not keep the same KV in one directory. Whether theirs is the same is known only when the model is
loaded (``vllm_plugin/identity.py``), and then the second one ends. But of two that are launched in the same way it is
certain beforehand. Others may share a directory: each has a folder there.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ragcache_core.config import CacheConfig
from ragcache_core.errors import EngineStartError

_held: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()


class DirectoryLock:
    """Held by the process that launches an engine until :meth:`release`, or until it dies."""

    def __init__(self, directory: Path, launch: str) -> None:
        """Take the lock; where the file system has none, or the file is another user's, nothing is taken.

        Raises:
            EngineStartError: an engine that was launched in the same way has it.
        """
        self._descriptor = -1
        with suppress(OSError):
            self._descriptor = os.open(
                directory / f"{launch}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
            )
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._close()
                raise EngineStartError(
                    f"{directory} is the cache directory of another engine that is running with the same model and "
                    "settings: stop that one, or give each engine a directory of its own"
                ) from None
        _held.add(self)

    def release(self) -> None:
        """Release the lock. Idempotent."""
        if self._descriptor >= 0:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        self._close()

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


def launch_digest(
    model: str, cache: CacheConfig, arguments: Sequence[str], environment: Mapping[str, str] = os.environ
) -> str:
    """Return a digest of what decides whose KV an engine keeps, as far as its launch says it.

    Engines of one digest keep the same KV: the model's files, vLLM's arguments and its variables are the same.
    """
    folder = Path(model).expanduser()
    files = [path.resolve() for path in sorted(folder.iterdir()) if path.is_file()] if folder.is_dir() else []
    facts = [(str(path), status.st_size, status.st_mtime_ns) for path in files for status in [path.stat()]]
    chunks = None if cache.chunk_reuse is None else cache.chunk_reuse.model_dump(mode="json")
    variables = sorted(
        (k, v) for k, v in environment.items() if k.startswith(("VLLM_", "CUDA_", "PYTHONHASH")) and k != "VLLM_API_KEY"
    )
    told = [str(folder.resolve()) if files else model, facts, cache.block_size, chunks, list(arguments), variables]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:32]


def _forget_all() -> None:
    """A fork does not own its parent's locks, and must not keep them when the parent has died."""
    for lock in _held:
        lock._close()


os.register_at_fork(after_in_child=_forget_all)
