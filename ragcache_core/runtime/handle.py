"""The base of objects that hold what stays in one process: connections, open files, locks."""

from __future__ import annotations

from typing import Any


class Handle:
    """Refuses to be copied or pickled, with an error that names the class."""

    def __getstate__(self) -> Any:
        raise TypeError(
            f"{type(self).__name__} holds open connections, files or locks, and cannot be copied or pickled: share the "
            "object within a process, and make one in each process that uses it"
        )
