"""The benchmark of real fleets: engines that start together end together, and damage is done to what is there."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest

from tests.benchmarks.engines import side_by_side
from tests.benchmarks.fleet.exactness import _damage
from tests.support.shared_stores import redis_server


def test_engines_that_start_side_by_side_are_all_closed_even_where_one_does_not_start() -> None:
    closed: list[int] = []
    numbers = itertools.count()

    def start() -> Any:
        if (number := next(numbers)) == 4:
            raise RuntimeError("no memory")
        return SimpleNamespace(number=number, close=lambda: closed.append(number))

    with side_by_side(3, start) as engines:
        assert sorted(engine.number for engine in engines) == [0, 1, 2]  # type: ignore[attr-defined]  # no engines
        assert closed == []
    assert sorted(closed) == [0, 1, 2]
    with pytest.raises(RuntimeError, match="no memory"), side_by_side(3, start):
        pass
    assert sorted(closed) == [0, 1, 2, 3, 5]


def test_each_way_to_damage_an_object_changes_or_deletes_it() -> None:
    with redis_server() as server:
        client, rng = server.client(), random.Random(0)
        assert not _damage(client, rng), "there is nothing"
        for number in range(60):
            client.set(f"object-{number}", bytes([number]) * 64)
        assert sum(_damage(client, rng) for _ in range(150)) > 50
        left: list[Any] = [client.get(f"object-{number}") for number in range(60)]
    assert any(data is None for data in left)
    assert any(data == b"" for data in left)
    assert any(data and len(data) != 64 for data in left)
    assert any(data and len(data) == 64 and data != bytes([number]) * 64 for number, data in enumerate(left))
