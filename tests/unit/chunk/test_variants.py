"""The table of variants: bounded, every content once, the least reusable replaced first; against a plain list."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ragcache_core.chunk import ChunkVariant, VariantTable
from tests.unit.chunk.captures import key, statistics

CHUNKS, PREFIXES = st.integers(0, 3), st.lists(st.integers(10, 13), max_size=2, unique=True)


@dataclass
class Kept:
    """A variant of the model, in a list where every question is answered by looking at all of them."""

    variant: ChunkVariant
    reuse: float
    is_pinned: bool = False


class TableMachine(RuleBasedStateMachine):
    """Captures, uses, pins and removals; a capture makes room first."""

    @initialize(max_variants=st.integers(1, 3))
    def start(self, max_variants: int) -> None:
        self.table = VariantTable(max_variants)
        self.max_variants = max_variants
        self.kept: list[Kept] = []
        self.numbers: set[int] = set()

    def _of(self, chunk: int) -> list[Kept]:
        return [kept for kept in self.kept if kept.variant.key == key(chunk)]

    def _is_evictable(self, variant: ChunkVariant) -> bool:
        return not any(kept.is_pinned for kept in self.kept if kept.variant is variant)

    @rule(chunk=CHUNKS, prefix=PREFIXES)
    def capture(self, chunk: int, prefix: list[int]) -> None:
        measured = statistics(3, [(name, 5, 1.0) for name in prefix])
        known = [kept.variant for kept in self._of(chunk) if kept.variant.statistics.prefix == measured.prefix]
        assert self.table.captured_in(key(chunk), measured.context) is (known[0] if known else None)
        if known:
            return
        is_full = len(self._of(chunk)) >= self.max_variants
        assert self.table.is_full(key(chunk)) == is_full
        if is_full:
            candidates = [kept for kept in self._of(chunk) if not kept.is_pinned]
            lowest = min(candidates, key=lambda kept: (kept.reuse, kept.variant.number), default=None)
            victim = self.table.victim(key(chunk), self._is_evictable)
            assert victim is (lowest.variant if lowest else None)
            if victim is None or lowest is None:
                with pytest.raises(ValueError, match="evict first"):
                    self.table.add(key(chunk), 3, measured)
                return
            self.table.remove(victim)
            self.kept.remove(lowest)
        variant = self.table.add(key(chunk), 3, measured)
        assert variant.number not in self.numbers
        self.numbers.add(variant.number)
        self.kept.append(Kept(variant, 0.0))

    @rule(data=st.data(), overhead=st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0]))
    def use(self, data: st.DataObject, overhead: float) -> None:
        if self.kept:
            kept = data.draw(st.sampled_from(self.kept))
            self.table.record_use(kept.variant, overhead)
            kept.reuse += 1.0 / max(overhead, 1 / 3)

    @rule(data=st.data())
    def pin_or_unpin(self, data: st.DataObject) -> None:
        if self.kept:
            kept = data.draw(st.sampled_from(self.kept))
            kept.is_pinned = not kept.is_pinned

    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        if self.kept:
            kept = data.draw(st.sampled_from(self.kept))
            self.kept.remove(kept)
            self.table.remove(kept.variant)
            self.table.remove(kept.variant)  # twice is as good as once
            self.table.record_use(kept.variant, 0.5)

    @invariant()
    def table_holds_what_the_list_holds(self) -> None:
        assert len(self.table) == len(self.kept)
        for chunk in range(4):
            assert self.table.variants(key(chunk)) == tuple(kept.variant for kept in self._of(chunk))
            assert len(self._of(chunk)) <= self.max_variants
        for kept in self.kept:
            assert kept.variant in self.table
            assert self.table.reuse(kept.variant) == pytest.approx(kept.reuse)


TestTable = TableMachine.TestCase
TestTable.settings = settings(deadline=None, max_examples=40, stateful_step_count=40)


def test_the_variant_that_is_cheap_to_reuse_outlives_the_expensive_one() -> None:
    table = VariantTable(2)
    cheap, expensive = (table.add(key(0), 10, statistics(10, [(name, 5, 1.0)])) for name in (10, 11))
    table.record_use(cheap, 0.1)
    for _ in range(5):
        table.record_use(expensive, 1.0)
    assert (table.reuse(cheap), table.reuse(expensive)) == (10.0, 5.0)
    assert table.victim(key(0)) is expensive


def test_a_restored_table_goes_on_where_the_old_one_was() -> None:
    old, new = VariantTable(3), VariantTable(3)
    kept = [old.add(key(0), 3, statistics(3, [(name, 5, 1.0)])) for name in (10, 11, 12)]
    old.record_use(kept[0], 0.5)
    for variant in reversed(kept):
        new.restore(variant, reuse=old.reuse(variant))
    assert new.victim(key(0)) is old.victim(key(0)) is kept[1]
    new.remove(kept[1])
    assert new.add(key(1), 3, statistics(3)).number > max(variant.number for variant in kept)
