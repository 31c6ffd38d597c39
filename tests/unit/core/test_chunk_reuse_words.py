"""What is said of chunk reuse: settings, a request's own wish on the wire, and statistics."""

from __future__ import annotations

from typing import Any

import pytest

from ragcache_core import CacheConfig, ChunkReuse, ChunkReuseStats, RequestStats
from ragcache_core.config import ChunkReuseRequest
from ragcache_core.errors import ConfigError
from ragcache_core.stats import request_stats_from_dict
from ragcache_core.types import PromptSegment, SegmentKind
from ragcache_core.wire import (
    KEY,
    ChunkReuseOption,
    decode_kv_transfer_params,
    encode_kv_transfer_params,
    read_chunk_reuse,
    tile,
)


def test_chunks_need_host_memory() -> None:
    with pytest.raises(ConfigError, match="set host_bytes or leave chunk_reuse out"):
        CacheConfig(chunk_reuse=ChunkReuse(), host_bytes=0)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_error": 0.0}, r"max_error is 0\.0.*greater than 0"),
        ({"max_error": 0.6}, r"max_error is 0\.6.*less than or equal to 0\.5"),
        ({"max_error": 0.02, "quality": 0.9}, "both choose alpha, so give one"),
        ({"kind": "x" * 65}, "kind is 'xxx"),
        ({"max_variants": 0}, "max_variants is 0.*greater than or equal to 1"),
        ({"max_variants": 65}, "max_variants is 65.*less than or equal to 64"),
    ],
)
def test_a_setting_that_cannot_be_kept_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ChunkReuse(**settings)


# On the wire


@pytest.mark.parametrize(
    ("option", "on_the_wire", "read"),
    [
        (None, None, None),
        (False, False, False),
        ("store", "store", "store"),
        (True, True, ChunkReuseRequest()),
        ({}, True, ChunkReuseRequest()),
        ({"kind": "manual 2.1"}, {"kind": "manual 2.1"}, ChunkReuseRequest(kind="manual 2.1")),
        (ChunkReuseRequest(alpha=2.0), {"alpha": 2.0}, ChunkReuseRequest(alpha=2.0)),
        (
            {"selection": "cache_craft", "quality": 0.9, "max_recompute": 0},
            {"selection": "cache_craft", "quality": 0.9, "max_recompute": 0},
            ChunkReuseRequest(selection="cache_craft", quality=0.9, max_recompute=0),
        ),
    ],
)
def test_what_a_request_says_arrives(option: ChunkReuseOption, on_the_wire: object, read: object) -> None:
    params: Any = encode_kv_transfer_params([], chunk_reuse=option)
    assert params[KEY].get("chunk_reuse") == on_the_wire
    assert decode_kv_transfer_params(params, 5).chunk_reuse == read


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (0, "must be true, false, 'store', or a mapping of quality, selection"),
        ("yes", "must be true, false"),
        ([], "must be true, false"),
        ({"qualty": 1}, "a mapping of quality, selection"),
        ({"selection": "best"}, "cache_craft"),
        ({"selection": ["random"]}, "cache_craft"),
        ({"quality": 0}, r"quality is 0\b.*greater than 0"),
        ({"quality": 2}, "quality is 2.*less than or equal to 1"),
        ({"quality": True}, "quality is True"),
        ({"quality": 0.5, "alpha": 1}, "so give one"),
        ({"alpha": -0.5}, "alpha is -0.5"),
        ({"alpha": float("inf")}, "alpha is inf"),
        ({"alpha": float("nan")}, "alpha is nan"),
        ({"alpha": "1"}, "alpha is '1'"),
        ({"max_recompute": 1.5}, "max_recompute is 1.5"),
        ({"kind": ""}, "kind is ''"),
        ({"kind": 'a"b'}, "kind is"),
        ({"max_error": 0.1}, "a mapping of quality, selection"),
    ],
)
def test_nonsense_is_refused_on_both_sides(raw: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_chunk_reuse(raw)
    with pytest.raises(ConfigError, match=said):
        encode_kv_transfer_params([], chunk_reuse=raw)
    with pytest.raises(ConfigError, match=said):
        decode_kv_transfer_params({KEY: {"version": 1, "documents": [], "chunk_reuse": raw}}, 5)


def test_a_document_is_announced_without_what_separates_it_from_the_next() -> None:
    spans = [(3, 9, "a"), (11, 20, "b")]
    segments = tile([PromptSegment(SegmentKind.DOCUMENT, *span) for span in spans], 25)
    params: Any = encode_kv_transfer_params(segments)
    assert [(d["start"], d["end"], d["id"]) for d in params[KEY]["documents"]] == spans
    assert decode_kv_transfer_params(params, 25).segments == segments
    assert [s.end for s in segments] == [3, 11, 20, 25]


# Statistics


def test_the_statistics_of_a_request_survive_their_way_through_a_response() -> None:
    reuse = ChunkReuseStats(2, 700, 300, 340, 0.3, (4, 9))
    stats = RequestStats(1100, 760, 5, 0.1, 0.2, chunk_reuse=reuse)
    assert request_stats_from_dict(stats.to_dict()) == stats
    assert stats.num_computed_tokens == 340


@pytest.mark.parametrize("reuse", [{"num_chunks": 1}, {"variants": []}, 7])
def test_damaged_statistics_are_a_value_error(reuse: object) -> None:
    data = {**RequestStats(1100, 760, 5, 0.1, 0.2).to_dict(), "chunk_reuse": reuse}
    with pytest.raises(ValueError, match="not the statistics"):
        request_stats_from_dict(data)
