"""The index that llm-d's router keeps of KV events, and its score of a replica, in Python.

It follows `pkg/kvevents` and `pkg/kvcache` of llm-d-router 0.9: the same decoding, keys, tiers and gaps. It is no part
of llm-d, whose program is not in a package registry.

- Events are maps with a type; a batch with one that is malformed is dropped.
- Keys are of tokens, in blocks of the index's own size; an engine's hashes only name them.
- A block behind an unknown parent is dropped. Hashes without tokens are resolved if they are known.
- Stores of one hash in one tier are counted: the last removal counts.
- `AllBlocksCleared`, and a batch number that decreases, empty all tiers of a replica.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec

_PREFIX_KINDS = ("full_attention", "mla_attention", "sink_full_attention")


class LlmdIndex:
    """What each replica holds, by block and tier.

    Attributes:
        block_size: tokens of a block of the index.
        weights: of tiers in a score; llm-d gives a tier that is not named the weight 1.
        num_unresolved: blocks that were stored behind an unknown parent, or by an unknown hash alone.
    """

    def __init__(self, block_size: int, weights: dict[str, float]) -> None:
        self.block_size = block_size
        self.weights = weights
        self.num_unresolved = 0
        self._entries: dict[int, set[tuple[str, str, int | None]]] = defaultdict(set)
        self._keys_of: dict[int, list[int]] = {}
        self._num_stores: Counter[tuple[str, str, int | None, int]] = Counter()
        self._kinds: dict[tuple[str, int], str] = {}
        self._last_numbers: dict[str, int] = {}

    def receive(self, topic: str, number: int, payload: bytes) -> None:
        """Take a batch in, as it is published: ``kv@REPLICA@MODEL``, its number, and a message of MessagePack."""
        _, replica, model = topic.split("@")
        if number < self._last_numbers.get(replica, 0):
            self._clear(replica)
        self._last_numbers[replica] = number
        _, events, *_ = msgspec.msgpack.decode(payload)
        assert all(isinstance(event, dict) and "type" in event for event in events)
        for event in events:
            match event["type"]:
                case "BlockStored":
                    self._store(replica, model, event)
                case "BlockRemoved":
                    self._remove(replica, event)
                case "AllBlocksCleared":
                    self._clear(replica)

    def tiers(self, tokens: Sequence[int], model: str, replica: str) -> list[set[str]]:
        """Return for each block of a prompt the tiers in which a replica has it."""
        keys = self._keys(None, tokens, model)
        return [{tier for holder, tier, _ in self._entries.get(key, ()) if holder == replica} for key in keys]

    def score(self, tokens: Sequence[int], model: str, replica: str) -> float:
        """Return the weights of the fastest tiers of a replica's blocks, summed over the longest prefix that it has."""
        score = 0.0
        for tiers in self.tiers(tokens, model, replica):
            if not tiers:
                break
            score += max(self.weights.get(tier, 1.0) for tier in tiers)
        return score

    def num_entries(self, replica: str) -> Counter[str]:
        """Return how many blocks a replica has in each tier."""
        return Counter(tier for held in self._entries.values() for holder, tier, _ in held if holder == replica)

    def _store(self, replica: str, model: str, event: dict[str, Any]) -> None:
        tier, group, tokens = _tier(event), event.get("group_idx"), event["token_ids"]
        hashes = [_short(block_hash) for block_hash in event["block_hashes"]]
        if group is not None:
            kind = self._kinds.setdefault((replica, group), event.get("kv_cache_spec_kind") or "")
            if (event.get("kv_cache_spec_kind") or kind) not in _PREFIX_KINDS:
                self.num_unresolved += len(hashes)
                return
        parent: int | None = None
        if event["parent_block_hash"] is not None:
            if (before := self._keys_of.get(_short(event["parent_block_hash"]))) is None:
                self.num_unresolved += len(hashes)
                return
            parent = before[-1]
        keys = self._keys(parent, tokens, event.get("lora_name") or model)
        if keys:
            num = max(len(hashes), len(keys))
            named: dict[int, list[int]] = defaultdict(list)
            for i in range(num):
                named[hashes[i * len(hashes) // num]].append(keys[i * len(keys) // num])
            self._keys_of.update(named)
        elif not tokens:
            keys = [self._keys_of[each][-1] for each in hashes if each in self._keys_of]
            self.num_unresolved += len(hashes) - len(keys)
        if not keys:
            return
        for key in keys:
            self._entries[key].add((replica, tier, group))
        self._num_stores.update((replica, tier, group, each) for each in hashes)

    def _remove(self, replica: str, event: dict[str, Any]) -> None:
        tier, group = _tier(event), event.get("group_idx")
        if group is not None and self._kinds.get((replica, group), "") not in _PREFIX_KINDS:
            return
        for each in map(_short, event["block_hashes"]):
            stored = (replica, tier, group, each)
            self._num_stores[stored] -= 1
            if self._num_stores[stored] > 0:
                continue
            del self._num_stores[stored]
            for key in self._keys_of.get(each, ()):
                self._entries[key].discard((replica, tier, group))

    def _clear(self, replica: str) -> None:
        for held in self._entries.values():
            held.difference_update([entry for entry in held if entry[0] == replica])
        for stored in [stored for stored in self._num_stores if stored[0] == replica]:
            del self._num_stores[stored]

    def _keys(self, parent: int | None, tokens: Sequence[int], model: str) -> list[int]:
        """Return the keys of whole blocks: each of its tokens and of all before it."""
        keys, before = [], hash(model) if parent is None else parent
        for start in range(0, len(tokens) - self.block_size + 1, self.block_size):
            before = hash((before, *tokens[start : start + self.block_size]))
            keys.append(before)
        return keys


def _tier(event: dict[str, Any]) -> str:
    return str(event.get("medium") or "GPU").lower()


def _short(block_hash: int | bytes) -> int:
    return block_hash if isinstance(block_hash, int) else int.from_bytes(block_hash[-8:], "big")
