"""Import what the first request would import otherwise: packages load parts of themselves when they are first used."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_LAZY = ("openai.resources", "anyio._backends._asyncio", "ragcache_core.client.prompts.chat_template")
"""What openai needs for its first request, httpx for its first asynchronous one, and a prompt: 0.2 to 0.4 s."""


def import_requests() -> None:
    """Import it now."""
    for name in _LAZY:
        importlib.import_module(name)


@contextmanager
def importing_requests() -> Iterator[None]:
    """Import it while the body waits for something else; leaving the body waits for the import to end."""
    thread = threading.Thread(target=import_requests, name="ragcache-imports")
    thread.start()
    try:
        yield
    finally:
        thread.join()
