"""Base class of objects with process-bound resources: connections, open files, locks."""

from __future__ import annotations

import os
from typing import Any

from ragcache_core.errors import EngineForkedError


class Handle:
    """Base class of objects that cannot be copied or pickled; the error names the class."""

    def __getstate__(self) -> Any:
        raise TypeError(
            f"{type(self).__name__} holds open connections, files or locks, and cannot be copied or pickled: share the "
            "object within a process, and make one in each process that uses it"
        )


class OneProcess:
    """The process in which a client was made. A fork copies its locks, but not its threads."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_forked(self) -> bool:
        """Whether this code runs in a fork of that process."""
        return os.getpid() != self._pid

    def check(self) -> None:
        """Raise in a fork, before any lock is taken.

        Raises:
            EngineForkedError: this is a fork.
        """
        if self.is_forked:
            raise EngineForkedError(
                "the engine's handle was made before a fork, and works in the parent process alone: launch or connect "
                "in the process that asks"
            )
