"""Request scopes: of equal requests each joins the speculation that was sent ahead of it, and not another's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar

_scope: ContextVar[object | None] = ContextVar("ragcache_request_scope", default=None)


def current_scope() -> object | None:
    """Return the scope that requests are made in here; ``None``: in none."""
    return _scope.get()


@contextmanager
def request_scope(scope: object) -> Iterator[None]:
    """Make requests and speculations in ``scope``. No generator may yield inside: its reader would be in it, too."""
    token = _scope.set(scope)
    try:
        yield
    finally:
        with suppress(ValueError):  # what never went on is closed in another context, which was not changed
            _scope.reset(token)
