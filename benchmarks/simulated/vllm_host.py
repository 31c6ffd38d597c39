"""vLLM's own host tier, without RAGCache: blocks by their keys, evicted by its LRU or ARC, prefixes or not."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Hashable, Iterator, Sequence

from ragcache_core.sim.block_tiers import HostBlocks
from ragcache_core.types import Tier

_Chunks = OrderedDict[Hashable, None]


class VLLMHostBlocks(HostBlocks):
    """The blocks that ``vllm.v1.kv_offload.cpu`` of 0.32 keeps.

    A chunk that is stored enters ``_once``, ARC's T1. When a request ends that found it, it moves to ``_often``, T2;
    then all that the request stored or found is as new as its first chunk, which goes last. ARC takes from T1 while it
    is larger than its target, which a miss of what T1 gave up raises, and of what T2 gave up lowers. An LRU has one
    list.
    """

    def __init__(self, num_blocks: int, *, is_arc: bool) -> None:
        self.num_blocks = num_blocks
        self._is_arc = is_arc
        self._once: _Chunks = OrderedDict()
        self._often: _Chunks = OrderedDict()
        self._gone: tuple[_Chunks, _Chunks] = (OrderedDict(), OrderedDict())
        self._target = 0.0
        self._in_use: Counter[Hashable] = Counter()
        self._writing: list[Hashable] = []

    def look_up(self, keys: Sequence[Hashable]) -> list[Tier]:
        """Return where the first of ``keys`` come from, up to the first that is not here; they are held."""
        found = next((i for i, key in enumerate(keys) if not self._has(key)), len(keys))
        self._in_use.update(keys[:found])
        return [Tier.HOST] * found

    def release(self, keys: Sequence[Hashable]) -> None:
        """Note that what was looked up lies on the GPU now."""
        self._in_use -= Counter(keys)

    def store(self, keys: Sequence[Hashable]) -> list[Hashable]:
        """Copy what is not here yet, and return it; nothing where not all of it fits."""
        new = [key for key in keys if not self._has(key)]
        if self._is_arc:
            for key in reversed(new):
                self._learn(key)
        num_missing = len(new) - (self.num_blocks - len(self._once) - len(self._often))
        if num_missing > 0 and not self._evict(num_missing, set(keys)):
            return []
        for key in new:
            self._once[key] = None
            for gone in self._gone:
                gone.pop(key, None)
        self._in_use.update(new)
        self._writing += new
        return new

    def settle(self) -> None:
        """Note that what was being written is here."""
        self.release(self._writing)
        self._writing.clear()

    def on_answered(self, keys: Sequence[Hashable], stored: Collection[Hashable], found: Collection[Hashable]) -> None:
        """Note that a request ended whose prompt and answer have ``keys``."""
        for key in reversed(keys):
            if key in self._often and (key in stored or key in found):
                self._often.move_to_end(key)
            elif key in self._once and (key in stored or (key in found and not self._is_arc)):
                self._once.move_to_end(key)
            elif key in self._once and key in found:
                del self._once[key]
                self._often[key] = None

    def _has(self, key: Hashable) -> bool:
        return key in self._once or key in self._often

    def _learn(self, key: Hashable) -> None:
        once, often = self._gone
        if key in once:
            self._target = min(self._target + max(1.0, len(often) / len(once)), float(self.num_blocks))
            once.move_to_end(key)
        elif key in often:
            self._target = max(self._target - max(1.0, len(once) / len(often)), 0.0)
            often.move_to_end(key)

    def _evict(self, num_blocks: int, protected: Collection[Hashable]) -> bool:
        """Evict ``num_blocks``; none, where fewer can be evicted."""

        def free(chunks: _Chunks) -> Iterator[Hashable]:
            return (key for key in chunks if not self._in_use[key] and key not in protected)

        once, often, num_once = free(self._once), free(self._often), len(self._once)
        victims: list[tuple[Hashable, bool]] = []
        for _ in range(num_blocks):
            key = next(once, None) if num_once >= int(self._target) else None
            is_once = key is not None
            if key is None:
                key = next(often, None)
            if key is None:
                key, is_once = next(once, None), True
            if key is None:
                return False
            num_once -= is_once
            victims.append((key, is_once))
        for key, is_once in victims:
            del (self._once if is_once else self._often)[key]
            self._gone[not is_once][key] = None
        for gone in self._gone:
            while len(gone) > self.num_blocks:
                gone.popitem(last=False)
        return True
