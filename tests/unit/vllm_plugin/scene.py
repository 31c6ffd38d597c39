"""A controller, and requests that run through it."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any, TypeVar

from ragcache_core.policy import PrefillCostModel
from ragcache_core.types import PromptSegment, SegmentKind, Tier
from ragcache_core.vllm_plugin.cache.controller import CacheController, TierReport
from ragcache_core.vllm_plugin.settings import PluginSettings
from ragcache_core.wire import RequestMetadata

BLOCK = 4
_Answer = TypeVar("_Answer")


def controller(*, tiers: Mapping[Tier, TierReport] | None = None, **settings: Any) -> CacheController:
    return CacheController(
        PluginSettings(**{"policy": "pgdsf", **settings}),
        tokens_per_block=BLOCK,
        prefill_cost=PrefillCostModel.default(),
        tiers=tiers,
    )


def answer_of(call: Generator[int, None, _Answer]) -> _Answer:
    """Run an operator call to its end, and return the answer."""
    while True:
        try:
            next(call)
        except StopIteration as end:
            answer: _Answer = end.value
            return answer


def keys(num_blocks: int, mark: str = "") -> list[bytes]:
    return [f"{mark}{i}".encode() for i in range(num_blocks)]


def segments(*ends: tuple[str | None, int]) -> tuple[PromptSegment, ...]:
    """Return segments by their ends; None is the question, "" the prefix."""
    found, start = [], 0
    for name, end in ends:
        kind = SegmentKind.QUESTION if name is None else SegmentKind.DOCUMENT if name else SegmentKind.PREFIX
        found.append(PromptSegment(kind, start, end, name or None))
        start = end
    return tuple(found)


def run(
    it: CacheController,
    request_id: str,
    parts: tuple[PromptSegment, ...],
    block_keys: Sequence[bytes],
    by_tier: dict[Tier, int] | None = None,
) -> dict[str, object]:
    """Let a request come, run and end, and return its figures."""
    it.on_new_request(request_id, RequestMetadata(parts), block_keys, parts[-1].end, 10.0)
    it.on_admitted(request_id, block_keys, by_tier or {}, 10.5)
    it.on_first_token(request_id, 11.0)
    figures = it.on_finished(request_id)
    assert figures is not None
    return figures


def nodes(it: CacheController) -> list[tuple[str | None, int, int, bool]]:
    """Return every node as name, first block, number of blocks, is transient."""
    return sorted(
        ((n.doc_id, n.start, len(n.keys), n.is_transient) for n in it.tree.nodes()), key=lambda node: node[1:]
    )
