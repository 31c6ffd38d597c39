"""The meeting point of an engine's workers: in the engine's folder, which is deleted with it, not in /tmp."""

from __future__ import annotations

import os
from pathlib import PurePath
from typing import Any

from ragcache_core.runtime.environment import SOCKETS_ENV

_FILE = "file://"


class PrivateRendezvous:
    """Mixin of a platform's worker: moves vLLM's file from the temporary folder to the engine's folder.

    All workers of an engine get the same file, and move it in the same way. Without a GPU, several workers also name
    their shared memory after it, and leave that behind when they are killed.
    """

    def __init__(self, *, distributed_init_method: str, **kwargs: Any) -> None:
        kwargs["distributed_init_method"] = in_private_folder(distributed_init_method)
        super().__init__(**kwargs)


def in_private_folder(init_method: str) -> str:
    """Return the meeting point in the engine's folder; ``init_method`` if that is no file, or no folder is known."""
    folder = os.environ.get(SOCKETS_ENV)
    if folder is None or not init_method.startswith(_FILE):
        return init_method
    return f"{_FILE}{folder}/{PurePath(folder).name}.{PurePath(init_method).name}"
