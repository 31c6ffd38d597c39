"""What vLLM hands back of a copy as a set, and the tiers get in the order of its path."""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import Any

from vllm.v1.kv_offload.base import OffloadKey, ReqContext, make_offload_key

from ragcache_core.vllm_plugin.compat import CPULoadStoreSpec, PrepareStoreOutput
from ragcache_core.vllm_plugin.lower.manager import TierManager


class Primary:
    """Host memory that stores every second block that it is offered, and notes what ends in it."""

    def __init__(self) -> None:
        self.ended: list[tuple[str, list[OffloadKey], bool]] = []

    def prepare_store(self, keys: Collection[OffloadKey], request: ReqContext) -> PrepareStoreOutput:
        new = list(keys)[::2]
        return PrepareStoreOutput(keys_to_store=new, store_spec=CPULoadStoreSpec([0] * len(new)), evicted_keys=[])

    def prepare_load(self, keys: Collection[OffloadKey], request: ReqContext) -> CPULoadStoreSpec:
        return CPULoadStoreSpec([0] * len(keys))

    def complete_store(self, keys: Collection[OffloadKey], request: ReqContext, success: bool = True) -> None:
        self.ended.append((request.req_id, list(keys), success))

    def complete_load(self, keys: Collection[OffloadKey], request: ReqContext) -> None:
        self.ended.append((request.req_id, list(keys), True))

    def on_new_request(self, request: ReqContext) -> None: ...

    def on_request_finished(self, request: ReqContext) -> None: ...


def test_copies_end_in_the_order_in_which_they_began_whichever_ends_first() -> None:
    primary: Any = Primary()
    manager, dice = TierManager(primary, [], 64), random.Random(0)
    keys = [make_offload_key(dice.randbytes(32), 0) for _ in range(60)]
    contexts = [ReqContext("a"), ReqContext("b")]
    begun: list[tuple[ReqContext, list[OffloadKey], bool]] = []
    for context in contexts:
        manager.on_new_request(context)
        for first in (0, 20, 40):
            manager.prepare_store(keys[first : first + 20], context)
            begun.append((context, keys[first : first + 20 : 2], True))
        manager.prepare_load(keys[1:9], context)
        begun.append((context, keys[1:9], False))
    dice.shuffle(begun)
    for context, copied, is_store in begun:
        if is_store:
            manager.spoil(copied[:1] if copied[0] == keys[20] else [])
            manager.complete_store(set(copied), context)
        else:
            manager.complete_load(set(copied), context)
    assert primary.ended == [(context.req_id, copied, copied[0] != keys[20]) for context, copied, _ in begun]
