"""What is learnt of a source's stages: shared by its retrievers, kept in files, and never in the way."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ragcache_core.client.pipeline.histories import Histories, SourceHistory
from ragcache_core.speculation import StageStabilityStats

WRONG, RIGHT = ("mars",), ("sun",)


@dataclass(frozen=True, slots=True)
class Named:
    identity: Any = "/srv/docs.ragcache"


def learn(
    histories: Histories, named: Sequence[str], source: object = Named(), searches: int = 8, left_s: float = 0.5
) -> None:
    for _ in range(searches):
        history(histories, source).record(0, named, RIGHT, left_s)


def history(histories: Histories, source: object = Named(), *settings: object) -> StageStabilityStats:
    return histories.of(source, settings, default=SourceHistory()).history


def test_all_who_search_a_source_with_the_same_settings_learn_together(tmp_path: Path) -> None:
    histories = Histories(tmp_path)
    assert history(histories, Named(), 4) is history(histories, Named(), 4)
    others = {id(history(histories, Named("/srv/other"), 4)), id(history(histories, Named(), 5))}
    assert id(history(histories, Named(), 4)) not in others


def test_another_process_begins_with_what_was_learnt(tmp_path: Path) -> None:
    learn(Histories(tmp_path), WRONG)
    later = history(Histories(tmp_path))
    assert later.is_known(0)
    assert not later.is_worthwhile(0, is_idle=True)
    assert not history(Histories(tmp_path), Named("/srv/other")).is_known(0)


def test_three_searches_are_kept_already_and_what_changes_later_too(tmp_path: Path) -> None:
    histories = Histories(tmp_path)
    learn(histories, WRONG, searches=2)
    assert list(tmp_path.iterdir()) == []
    learn(histories, WRONG, searches=1)
    assert not history(Histories(tmp_path)).is_worthwhile(0, is_idle=True)
    learn(histories, RIGHT, searches=16)
    assert history(Histories(tmp_path)).is_worthwhile(0, is_idle=False)
    learn(histories, RIGHT, searches=40, left_s=0.0)
    assert not history(Histories(tmp_path)).is_worthwhile(0, is_idle=True)


def test_a_source_that_stays_as_it_is_writes_no_file_again(tmp_path: Path) -> None:
    histories = Histories(tmp_path)
    learn(histories, RIGHT)
    [path] = tmp_path.iterdir()
    path.unlink()
    learn(histories, RIGHT, searches=100)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("identity", [None, "", 7])
def test_a_source_without_a_name_is_its_retrievers_own_business(tmp_path: Path, identity: object) -> None:
    histories, own = Histories(tmp_path), SourceHistory()
    assert histories.of(Named(identity), (), default=own) is own
    assert histories.of(object(), (), default=own) is own


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"\xff\x00",
        b"[]",
        b'{"format": 2}',
        b'{"format": 2, "stages": {"0": 3}}',
        b'{"format": 2, "stages": {"0": [1.0, 9]}}',
        b'{"format": 2, "stages": {"0": [NaN, 0.5, 9]}}',
        b'{"format": 2, "stages": {"0": [7.0, 0.5, 9]}}',
        b'{"format": 2, "stages": {"0": ["a", 0.5, 9]}}',
        b'{"format": 2, "stages": {"0": [1.0, -1.0, 9]}}',
        b'{"format": 2, "stages": {"0": [1.0, Infinity, 9]}}',
        b'{"format": 2, "stages": {"0": [1.0, 0.5, "b"]}}',
        b'{"format": 2, "stages": {"first": [1.0, 0.5, 9]}}',
        b'{"format": 1, "stages": {"0": [1.0, 9]}}',
    ],
)
def test_a_damaged_file_is_as_if_it_were_not_there_and_is_replaced(tmp_path: Path, damaged: bytes) -> None:
    learn(Histories(tmp_path), WRONG)
    [path] = tmp_path.iterdir()
    path.write_bytes(damaged)
    assert history(Histories(tmp_path)).learnt == {}
    learn(Histories(tmp_path), WRONG)
    assert json.loads(path.read_bytes())["stages"] == {"0": [0.0, 0.5, 3]}


def test_a_folder_that_cannot_be_written_to_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    histories = Histories(tmp_path / "file" / "stages")
    learn(histories, WRONG)
    assert not history(histories).is_worthwhile(0, is_idle=True)


def test_a_file_names_no_store_and_is_its_owners_alone(tmp_path: Path) -> None:
    learn(Histories(tmp_path / "stages"), WRONG)
    [path] = (tmp_path / "stages").iterdir()
    assert "docs" not in path.name + path.read_text()
    assert path.stat().st_mode & 0o077 == 0
    assert path.parent.stat().st_mode & 0o077 == 0


def test_the_files_do_not_become_more_and_more(tmp_path: Path) -> None:
    for number in range(300):
        (tmp_path / f"{number:032x}.json").write_text("{}")
    learn(Histories(tmp_path), WRONG)
    assert len(list(tmp_path.iterdir())) == 256
    assert history(Histories(tmp_path)).is_known(0), "the newest stays"
