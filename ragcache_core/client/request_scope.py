"""Who asks: of equal requests each shall join the speculation that was sent ahead of it, and not another's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar

_asker: ContextVar[object | None] = ContextVar("ragcache_asker", default=None)


def current_asker() -> object | None:
    """Return in whose name requests are made here; ``None``: in nobody's."""
    return _asker.get()


@contextmanager
def asking_for(asker: object) -> Iterator[None]:
    """Make requests and speculations in the name of ``asker``. No generator may yield inside: its reader would too."""
    token = _asker.set(asker)
    try:
        yield
    finally:
        with suppress(ValueError):  # what never went on is closed in another context, which was not changed
            _asker.reset(token)
