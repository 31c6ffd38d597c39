"""Prompts of no request yet: some wait for room in host memory."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from ragcache_core.types import Tier
from ragcache_core.vllm_plugin.cache.kv_groups import KVGroups
from ragcache_core.vllm_plugin.disk.prefetcher import DiskPrefetcher


@dataclass(eq=False)
class Prompt:
    request_id: str
    block_hashes: tuple[bytes, ...] = (b"key",)


def prompt(number: int) -> Any:
    return Prompt(f"prompt{number}")


def test_of_very_many_prompts_the_first_are_abandoned() -> None:
    ended: list[str] = []
    read: list[str] = []
    controller: Any = SimpleNamespace(
        tiers={Tier.HOST: SimpleNamespace(num_blocks=32)},
        groups=KVGroups(),
        tokens_per_block=1,
        last_known=lambda keys: keys[-1],
        leading_blocks=lambda key: (0, 0, 8),
    )
    awaited = {"prompt6"}
    policy: Any = SimpleNamespace(is_awaited=lambda request_id, num_tokens: request_id in awaited)
    it = DiskPrefetcher(
        controller, policy, lambda request, _: read.append(request.request_id), lambda r: ended.append(r.request_id)
    )
    for number in range(70):
        assert it.reads(prompt(number))
        it.add_prompt(prompt(number))
    assert ended == [f"prompt{number}" for number in range(6)]
    for _ in range(3):
        it.begin_reads()
    assert read == ["prompt6"], "a quarter of host memory"
    awaited.clear()
    it.begin_reads()
    assert ended[6:] == ["prompt6"]
    it.remove("prompt6")
    it.begin_reads()
    assert read == ["prompt6", "prompt7"]
    assert it.is_prefetching
