"""A store whose searches begin late, so that what can be known before them is known, however busy the machine is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from ragcache_core.retrieval import DocumentStore
from ragcache_core.types import RetrievalUpdate

_LATE_S = 0.3


def begin_late(store: DocumentStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the first stage of each of the store's searches come a third of a second later."""
    search = store.search_staged

    async def search_late(*args: Any, **settings: Any) -> AsyncGenerator[RetrievalUpdate, None]:
        await asyncio.sleep(_LATE_S)  # what is read meanwhile is what the test is about
        async for update in search(*args, **settings):
            yield update

    monkeypatch.setattr(store, "search_staged", search_late)
