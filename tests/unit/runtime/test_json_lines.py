"""A server's log as lines of JSON: whole lines, whatever pieces they come in, and nothing lost of them."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.runtime.json_lines import JSONLines, json_line


def converted(*pieces: bytes) -> list[dict[str, Any]]:
    lines = JSONLines()
    shown = b"".join(map(lines.feed, pieces)) + lines.end()
    return [json.loads(line) for line in shown.splitlines()]


def test_what_vllm_writes_is_taken_apart() -> None:
    log = (
        b"(APIServer pid=13) INFO 11-28 00:38:15 [api_utils.py:286] non-default args: {'a': 1}\n"
        b"WARNING 11-28 00:38:16 [core.py:7] slow [really]\n"
        b"(EngineCore pid=14) ERROR 11-28 00:38:17 [async_store.py:285] RC-TIER-OFF: the disk: gone\n"
        b"(EngineCore_0 pid=14) Traceback (most recent call last):\n"
        b"INFO:     Started server process [7]\n"
        b"\n"
        b"plain \xff text"
    )
    lines = converted(log)
    assert all(line.pop("time").endswith("Z") for line in lines)
    assert lines == [
        {"level": "INFO", "process": "APIServer", "pid": 13, "source": "api_utils.py:286",
         "message": "non-default args: {'a': 1}"},
        {"level": "WARNING", "source": "core.py:7", "message": "slow [really]"},
        {"level": "ERROR", "process": "EngineCore", "pid": 14, "source": "async_store.py:285", "event": "RC-TIER-OFF",
         "message": "the disk: gone"},
        {"process": "EngineCore_0", "pid": 14, "message": "Traceback (most recent call last):"},
        {"level": "INFO", "message": "Started server process [7]"},
        {"message": "plain \ufffd text"},
    ]  # fmt: skip


@given(st.lists(st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\r\n"))), st.data())
def test_pieces_do_not_matter_and_no_text_is_lost(texts: list[str], data: st.DataObject) -> None:
    log = "".join(f"(A pid=1) ERROR 01-02 03:04:05 [a.py:1] {text}\n" for text in texts).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(log)), max_size=4)))
    pieces = [log[a:b] for a, b in zip([0, *cuts], [*cuts, len(log)], strict=True)]
    assert [line["message"] for line in converted(*pieces)] == texts


def test_a_line_of_ours_is_one_line_with_its_fields() -> None:
    line = json.loads(json_line("first\nsecond", level="ERROR", source="ragcache", pid=None))
    assert (line["message"], line["level"], line["source"]) == ("first\nsecond", "ERROR", "ragcache")
    assert "pid" not in line
