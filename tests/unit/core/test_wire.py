"""The metadata format: what one side writes the other reads, and contradictions are refused."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.errors import ConfigError
from ragcache_core.types import PromptSegment, SegmentKind
from ragcache_core.wire import (
    KEY,
    MAX_DOC_ID_CHARS,
    RequestMetadata,
    decode_kv_transfer_params,
    encode_kv_transfer_params,
    tile,
)


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[PromptSegment], int]:
    """Documents in order, with gaps between them, and the length of their prompt."""
    position, documents = 0, []
    for i in range(draw(st.integers(0, 6))):
        start = position + draw(st.integers(0, 3))
        position = start + draw(st.integers(1, 9))
        documents.append(PromptSegment(SegmentKind.DOCUMENT, start, position, f"doc-{i}"))
    return documents, position + draw(st.integers(0, 5))


@given(prompts())
def test_segments_tile_the_prompt_and_keep_every_document(prompt: tuple[list[PromptSegment], int]) -> None:
    documents, num_tokens = prompt
    segments = tile(documents, num_tokens)
    assert [token for s in segments for token in range(s.start, s.end)] == list(range(num_tokens))
    kept = [s for s in segments if s.kind is SegmentKind.DOCUMENT]
    assert [(s.doc_id, s.start) for s in kept] == [(d.doc_id, d.start) for d in documents]
    assert all(s.end >= d.end for s, d in zip(kept, documents, strict=True))


@given(
    prompts(),
    st.none() | st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True),
    st.booleans(),
    st.sampled_from([(False, 0), (True, 0), (True, 1), (True, 1000)]),
)
def test_what_the_client_encodes_the_engine_decodes(
    prompt: tuple[list[PromptSegment], int], speculation: str | None, is_reordered: bool, prefill: tuple[bool, int]
) -> None:
    is_prefill, expected_uses = prefill
    documents, num_tokens = prompt
    segments = tile(documents, num_tokens)
    params = encode_kv_transfer_params(
        segments,
        list(range(num_tokens)),
        speculation=speculation,
        is_reordered=is_reordered,
        is_prefill=is_prefill,
        expected_uses=expected_uses,
    )
    assert params["prompt_token_ids"] == list(range(num_tokens))
    assert decode_kv_transfer_params(params, num_tokens) == RequestMetadata(
        segments, speculation, is_reordered, is_prefill=is_prefill, expected_uses=expected_uses
    )


def _metadata(*documents: object, version: object = 1, **more: object) -> dict[str, object]:
    return {KEY: {"version": version, "documents": list(documents), **more}}


@pytest.mark.parametrize(
    ("params", "said"),
    [
        (_metadata({"id": "a", "start": 0, "end": 5}, {"id": "b", "start": 4, "end": 8}), "without overlap"),
        (_metadata({"id": "b", "start": 6, "end": 8}, {"id": "a", "start": 0, "end": 5}), "prompt order"),
        (_metadata({"id": "a", "start": 5, "end": 11}), "must lie in \\[0, 10\\)"),
        (_metadata({"id": "a", "start": -1, "end": 2}), "must lie in"),
        (_metadata({"id": "a", "start": 3, "end": 3}), "not be empty"),
        (_metadata({"id": "a", "start": 5, "end": 2}), "not be empty"),
        (_metadata({"id": "a", "start": "0", "end": 2}), "integer start and end"),
        (_metadata({"id": "a", "start": True, "end": 2}), "integer start and end"),
        (_metadata({"id": "", "start": 0, "end": 2}), "id of 1 to"),
        (_metadata({"id": "x" * (MAX_DOC_ID_CHARS + 1), "start": 0, "end": 2}), "id of 1 to"),
        (_metadata({"id": 7, "start": 0, "end": 2}), "id of 1 to"),
        (_metadata({"id": "\ud800", "start": 0, "end": 2}), "id of 1 to"),
        (_metadata({"id": "x" * (1 << 20), "start": 0, "end": 2}), "id of 1 to"),
        (_metadata({"id": "a", "start": 0}), "integer start and end"),
        (_metadata({"id": "a", "start": 0, "end": math.inf}), "integer start and end"),
        (_metadata("a"), "must hold an id"),
        (_metadata(None), "must hold an id"),
        (_metadata(*[{"id": "a", "start": 0, "end": 1}] * 10_000), "at most 4096 documents, got 10000"),
        (_metadata(version=2), "version 2, this engine reads 1"),
        ({KEY: "nonsense"}, "version 'nonsense'"),
        ({KEY: {"version": 1, "documents": {"id": "a"}}}, "got dict"),
        ({KEY: {"version": 1, "documents": None}}, "got NoneType"),
        (_metadata(speculation=""), "1 to 64 letters"),
        (_metadata(speculation="x" * 65), "1 to 64 letters"),
        (_metadata(speculation="../stats"), "1 to 64 letters"),
        (_metadata(speculation=7), "speculation of the ragcache metadata is 7"),
        (_metadata(reordered="yes"), "'reordered' of the ragcache metadata is 'yes'; it must be true or false"),
        (_metadata(expected_uses=3), "expected_uses is 3 of a request with an answer"),
        (_metadata(prefill=True, expected_uses=0), "expected_uses is 0; it must be a whole number from 1 to 1000"),
        (_metadata(prefill=True, expected_uses=1001), "from 1 to 1000"),
        (_metadata(prefill=True, expected_uses=10**400), "from 1 to 1000"),
        (_metadata(prefill=True, expected_uses=True), "from 1 to 1000"),
        (_metadata(prefill=True, expected_uses="many"), "from 1 to 1000"),
        (_metadata(prefill=1), "'prefill' of the ragcache metadata is 1; it must be true or false"),
    ],
)
def test_contradictory_metadata_is_refused_with_the_value_and_the_limit(params: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        decode_kv_transfer_params(params, 10)
    assert len(str(refused.value)) < 400
