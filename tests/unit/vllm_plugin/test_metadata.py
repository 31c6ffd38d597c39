"""Whatever a client says of its documents, the request is served."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcache_core.chunkstore.regrowing import note_of
from ragcache_core.errors import ConfigError
from ragcache_core.tree import check_invariants
from ragcache_core.wire import (
    KEY,
    MAX_DOC_ID_CHARS,
    MAX_DOCUMENTS,
    check_depth,
    decode_kv_transfer_params,
    decode_speculation,
    tile,
)
from tests.unit.vllm_plugin.scene import BLOCK, controller, keys, run


def nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "metadata",
    [
        nested(10_000),
        {"version": nested(10_000)},
        {"version": 1, "documents": [nested(10_000)]},
        {"version": 1, "documents": [], "speculation": nested(10_000)},
        {"version": 1, "documents": [], "reordered": nested(10_000)},
        {"version": 1, "documents": [], "chunk_reuse": {"selection": nested(10_000)}},
    ],
    ids=["all of it", "version", "document", "speculation", "reordered", "chunk_reuse"],
)
def test_metadata_that_is_nested_too_deeply_is_a_config_error(metadata: object) -> None:
    with pytest.raises(ConfigError, match="nested too deep"):
        decode_kv_transfer_params({KEY: metadata}, 100)
    assert decode_speculation({KEY: metadata}) is None


def test_metadata_may_be_as_deep_as_ours_and_not_as_deep_as_a_stack() -> None:
    documents = [{"id": str(i), "start": i, "end": i + 1, "more": {"deep": [1]}} for i in range(3)]
    check_depth({"version": 1, "documents": documents, "chunk_reuse": {"selection": "random"}}, "it")
    for deep in (list[object](), dict[str, object]()):
        value: object = deep
        for _ in range(100_000):
            value = [value] if isinstance(deep, list) else {"a": value}
        with pytest.raises(ConfigError, match="it is nested more than 8 deep: send"):
            check_depth(value, "it")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=5),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=4), children, max_size=4),
    max_leaves=8,
)
spans = st.fixed_dictionaries(
    {
        "id": st.text(st.characters(), max_size=4) | json_values,
        "start": st.integers(-3, 40) | json_values,
        "end": st.integers(-3, 40) | json_values,
    }
)


@settings(max_examples=300, deadline=None)
@given(
    metadata=st.fixed_dictionaries({"version": st.sampled_from((1, 1, 1, 2))}, optional={"documents": st.lists(spans)})
    | json_values,
    num_tokens=st.integers(1, 40),
    limit=st.none() | st.integers(1, 3),
)
def test_whatever_the_metadata_the_controller_serves_the_request(
    metadata: object, num_tokens: int, limit: int | None
) -> None:
    it = controller(max_cached_documents=limit)
    try:
        parts = decode_kv_transfer_params({KEY: metadata}, num_tokens).segments
    except ConfigError:
        parts = tile([], num_tokens)
    assert [part.start for part in parts] == [0, *[part.end for part in parts[:-1]]]
    assert parts[-1].end == num_tokens
    run(it, "r", parts, keys(num_tokens // BLOCK))
    check_invariants(it.tree)
    json.dumps(it.report()).encode()


def test_the_most_documents_with_the_longest_ids_are_served() -> None:
    it = controller()
    documents = [
        {"id": f"{i:04}".ljust(MAX_DOC_ID_CHARS, "\U0001f600"), "start": i * 4, "end": i * 4 + 4}
        for i in range(MAX_DOCUMENTS)
    ]
    parts = decode_kv_transfer_params({KEY: {"version": 1, "documents": documents}}, MAX_DOCUMENTS * 4).segments
    run(it, "r", parts, keys(MAX_DOCUMENTS))
    assert len(it.tree) == MAX_DOCUMENTS
    location = it.tree.locate(keys(MAX_DOCUMENTS)[-1])
    assert location is not None
    assert note_of(it.tree, location).doc_id == documents[-1]["id"], "and it can be stored"
