"""Random operations on a knowledge tree, against a model that knows nothing but sets of units."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import cast

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ragcache_core.policy import POLICIES, PrefillCostModel
from ragcache_core.tree import (
    KnowledgeTree,
    Location,
    NodeChanges,
    PathSegment,
    Retention,
    TreeNode,
    check_invariants,
    total_size,
)
from ragcache_core.types import Tier
from tests.unit.tree.scene import units_in

Key = tuple[str, ...]
LENGTHS = {"A": 1, "B": 3, "C": 2, "D": 5}
RETAINED_UNITS = 7


def nameless(document: str) -> None:
    """Name a segment by its other ids alone, as a block that a document begins in."""


class TreeMachine(RuleBasedStateMachine):
    """Requests come, units enter and leave the tiers; the model holds the sets of resident, held and retained keys."""

    @initialize(
        policy=st.sampled_from(sorted(POLICIES)),
        ghost_size=st.integers(0, 6),
        keeps=st.booleans(),
        replicated_units=st.sampled_from([0, 3, 6]),
    )
    def start(self, policy: str, ghost_size: int, keeps: bool, replicated_units: int) -> None:
        self.new_tree = lambda: KnowledgeTree(
            POLICIES[policy](PrefillCostModel.default()),
            ghost_size=ghost_size,
            keeps_frequency=keeps,
            replicated_units=replicated_units,
        )
        self.max_replicated = replicated_units
        self.num_answers = 0
        self._begin()

    def _begin(self) -> None:
        self.tree = self.new_tree()
        self.resident: dict[Tier, set[Key]] = {tier: set() for tier in Tier}
        self.held: dict[Tier, set[Key]] = {tier: set() for tier in Tier}
        self.retained: list[Key] = []
        self.protected: list[Key] = []
        self.retention = Retention(self.tree, lambda _: RETAINED_UNITS)
        self.kept: dict[Key, tuple[int, float, int]] = {}  # by the end of the path: priority, until when, number
        self.tree.changes = NodeChanges()
        self.changed = self.tree.changes.subscribe()
        self.seen: set[tuple[Tier, Key]] = set()
        self.named: dict[str, set[Key]] = {name: set() for name in (*LENGTHS, *map(str.lower, LENGTHS))}
        self.is_connected = True

    def _segments(
        self,
        documents: list[str],
        tail: int,
        name_of: Callable[[str], str | None] | None,
        other_name_of: Callable[[str], str | None] = nameless,
    ) -> list[PathSegment]:
        segments: list[PathSegment] = []
        names: list[str] = []
        for doc in documents:
            first = len(names)
            names += [f"{doc}{i}" for i in range(LENGTHS[doc])]
            keys = [tuple(names[: i + 1]) for i in range(first, len(names))]
            others = frozenset(filter(None, [other_name_of(doc)]))
            segments.append(
                PathSegment(
                    keys, len(keys), name_of(doc) if name_of else None, is_transient=doc == "D", other_ids=others
                )
            )
        if tail:
            names.append(f"question {tail}")
            segments.append(PathSegment([tuple(names)], 1))
        return segments if name_of else [PathSegment([k for s in segments for k in s.keys], len(names))]

    @rule(
        documents=st.lists(st.sampled_from("ABCD"), min_size=1, max_size=3),
        tail=st.integers(0, 2),
        name_of=st.sampled_from([None, str, str.lower, nameless]),
        other_name_of=st.sampled_from([str, str.lower, nameless]),
        tier=st.sampled_from(Tier),
        stays=st.booleans(),
    )
    def request(
        self,
        documents: list[str],
        tail: int,
        name_of: Callable[[str], str | None] | None,
        other_name_of: Callable[[str], str | None],
        tier: Tier,
        stays: bool,
    ) -> None:
        """The same document may come under two ids."""
        segments = self._segments(documents, tail, name_of, other_name_of)
        keys = [key for s in segments for key in s.keys]
        expected = 0
        while expected < len(keys) and any(keys[expected] in self.resident[t] for t in Tier):
            expected += 1
        match = self.tree.match_prefix(segments)
        assert match.num_units == expected
        assert sum(match.num_tokens_by_tier) == match.num_tokens
        nodes = {key: at.node for names in self.named.values() for key in names if (at := self.tree.locate(key))}
        path = self.tree.insert(segments)  # it drops nodes that nothing needs, and makes some of them again
        for names in self.named.values():
            names &= {key for key, node in nodes.items() if (at := self.tree.locate(key)) and at.node is node}
        assert [key for node in path for key in node.keys] == keys
        for segment in segments:
            for name in filter(None, (segment.doc_id, *segment.other_ids)):
                self.named[name].add(cast("Key", segment.keys[0]))
        self.retention.on_used(keys)
        self.kept = {end: entry for end, entry in self.kept.items() if end not in keys}
        self.tree.record_access(path, num_hit_units=expected, cost_per_token_s=1e-3)
        if stays:
            self.tree.retain(keys[-1])
            self.retained.append(keys[-1])
        for key in keys:  # what is missing in this tier and the faster ones is written, from the front
            if not any(key in self.resident[t] for t in Tier if t <= tier):
                location = self.tree.locate(key)
                assert location is not None
                self._add(location, tier)

    def _add(self, location: Location, tier: Tier) -> None:
        """Put a unit into a tier, which keeps its key for it."""
        key = location.node.keys[location.unit]
        self.tree.add(location.node, 1 << location.unit, tier)
        self.tree.tiers[tier].slots_of(location.node)[location.unit] = key
        self.resident[tier].add(cast("Key", key))

    @rule(tier=st.sampled_from(Tier), num_units=st.integers(1, 6), shields=st.booleans())
    def evict(self, tier: Tier, num_units: int, shields: bool) -> None:
        shielded = sorted(self.resident[tier])[:2] if shields else []
        evicted = self.tree.evict(tier, num_units, self.tree.units_of(shielded))
        if evicted is None:
            assert len(self._free(tier, shielded)) < num_units, "these could have gone"
            for key in self.protected:
                self.tree.unprotect(key)
            evicted = self.tree.evict(tier, num_units, self.tree.units_of(shielded))
            assert evicted is None, "what is protected goes all the same"
            for key in self.protected:
                self.tree.protect(key)
            return
        assert total_size(evicted) == num_units
        state = self.tree.tiers[tier]
        if not shields and any(run.node.id in state.protected for run in evicted):
            assert not [n for n in self.tree.nodes() if state.is_evictable(n) and n.id not in state.protected]
        for unit in units_in(evicted):
            assert unit.slot == unit.key in self.resident[tier] - self.held[tier] - set(shielded)
            self.resident[tier].remove(unit.key)

    def _free(self, tier: Tier, shielded: list[Key]) -> list[Key]:
        """Return the units of ``tier`` that are not held, and on which nothing stands but others of these."""
        slower = {key[:-1] for t in Tier if t > tier for key in self.resident[t]}
        stuck = {key[:n] for key in (*self.held[tier], *shielded, *slower) for n in range(1, len(key) + 1)}
        return [key for key in self.resident[tier] if key not in stuck]

    @rule(tier=st.sampled_from(Tier), num_units=st.integers(1, 9), data=st.data())
    def evict_beside_what_is_pinned(self, tier: Tier, num_units: int, data: st.DataObject) -> None:
        nodes = sorted(self.tree.nodes(), key=lambda node: node.id)
        pinned = data.draw(st.lists(st.sampled_from(nodes), max_size=3)) if nodes else []
        self.tree.pin(pinned)
        evicted = self.tree.evict_up_to(tier, num_units)
        assert total_size(evicted) <= num_units
        for unit in units_in(evicted):
            assert unit.node not in pinned
            assert unit.slot == unit.key
            self.resident[tier].remove(unit.key)
        state = self.tree.tiers[tier]
        assert total_size(evicted) == num_units or not any(state.is_evictable(node) for node in self.tree.nodes())
        check_invariants(self.tree, is_connected=self.is_connected)
        self.tree.unpin(pinned)

    @rule(data=st.data(), num_keys=st.integers(1, 3))
    def answer(self, data: st.DataObject, num_keys: int) -> None:
        """An answer grows behind what the GPU holds."""
        if not (known := sorted(self.resident[Tier.GPU])):
            return
        after = data.draw(st.sampled_from(known))
        self.num_answers += 1
        keys = [(*after, *(f"answer {self.num_answers}.{i}" for i in range(n + 1))) for n in range(num_keys)]
        self.tree.extend(after, keys, num_keys)
        for key in keys:
            location = self.tree.locate(key)
            assert location is not None
            assert self.tree.key_before(location) == key[:-1]
            self._add(location, Tier.GPU)

    def _draw_units(self, keys: list[Key], data: st.DataObject) -> tuple[TreeNode, int, set[Key]]:
        """Return a node, and some of its units that are among ``keys``, as a mask and as keys."""
        location = self.tree.locate(data.draw(st.sampled_from(keys)))
        assert location is not None
        node = location.node
        units = [unit for unit, key in enumerate(node.keys) if key in keys]
        chosen = data.draw(st.sets(st.sampled_from(units), min_size=1))
        return node, sum(1 << unit for unit in chosen), {cast("Key", node.keys[unit]) for unit in chosen}

    @rule(tier=st.sampled_from(Tier), data=st.data())
    def hold(self, tier: Tier, data: st.DataObject) -> None:
        if keys := sorted(self.resident[tier]):
            node, units, chosen = self._draw_units(keys, data)
            self.tree.acquire_units(node, units, tier)
            self.held[tier] |= chosen

    @rule(tier=st.sampled_from(Tier), data=st.data())
    def release_units(self, tier: Tier, data: st.DataObject) -> None:
        if keys := sorted(self.held[tier]):
            node, units, chosen = self._draw_units(keys, data)
            self.tree.release_units(node, units, tier)
            self.held[tier] -= chosen

    @precondition(lambda self: self.retained)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(set(self.retained))))
        self.retained.remove(key)
        self.tree.release(key)

    @rule(data=st.data())
    def protect(self, data: st.DataObject) -> None:
        if keys := sorted(key for node in self.tree.nodes() for key in node.keys if isinstance(key, tuple)):
            key = data.draw(st.sampled_from(keys))
            self.tree.protect(key)
            self.protected.append(key)

    @precondition(lambda self: self.protected)
    @rule(data=st.data())
    def unprotect(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(set(self.protected))))
        self.protected.remove(key)
        self.tree.unprotect(key)

    @rule(data=st.data(), seconds=st.integers(1, 3), priority=st.integers(0, 2))
    def retain_for(self, data: st.DataObject, seconds: int, priority: int) -> None:
        """A path is kept for a time, if need be in place of paths with a lower priority."""
        if not (keys := sorted(key for node in self.tree.nodes() for key in node.keys if isinstance(key, tuple))):
            return
        end = data.draw(st.sampled_from(keys))
        self.kept.pop(end, None)
        kept = dict(self.kept)
        lower = sorted((entry, key) for key, entry in kept.items() if entry[0] < priority)
        while (fits := self._num_units([*kept, end]) <= RETAINED_UNITS) is False and lower:
            del kept[lower.pop(0)[1]]
        assert self.retention.retain(end, seconds, priority) == fits
        if fits:
            self.num_answers += 1
            self.kept = {**kept, end: (priority, self.tree.now_s + seconds, self.num_answers)}

    @rule(seconds=st.integers(0, 2))
    def time_passes(self, seconds: int) -> None:
        self.tree.now_s += seconds
        self.retention.tick()
        self.kept = {end: entry for end, entry in self.kept.items() if entry[1] > self.tree.now_s}

    @rule(data=st.data(), tier=st.sampled_from(Tier))
    def demote(self, data: st.DataObject, tier: Tier) -> None:
        """The end of a path that one request used goes before all that was not demoted, unless it is protected."""
        if not (keys := sorted(key for node in self.tree.nodes() for key in node.keys if isinstance(key, tuple))):
            return
        end = data.draw(st.sampled_from(keys))
        first = data.draw(st.integers(0, len(end) - 1))
        self.retention.demote_after(0, end, first)
        location = self.tree.locate(end)
        assert location is not None
        below = [node for node in location.node.path() if node.start >= first and node.frequency <= 1]
        assert all(node.is_transient for node in below)
        state = self.tree.tiers[tier]
        free = [n for n in self.tree.nodes() if state.is_evictable(n) and n.id not in state.protected]
        if (victim := self.tree.victim(tier)) is not None and any(node.is_transient for node in free):
            assert victim.is_transient

    def _num_units(self, ends: list[Key]) -> int:
        """Return the units of all nodes on the paths to some units."""
        places = [at for end in ends if (at := self.tree.locate(end)) is not None]
        return sum(len(node.keys) for node in {step for at in places for step in at.node.path()})

    @rule()
    def reset_the_gpu(self) -> None:
        if not self.resident[Tier.HOST] and not self.resident[Tier.DISK]:
            self.tree.clear_tier(Tier.GPU)
            self.resident[Tier.GPU].clear()
            self.held[Tier.GPU].clear()

    @rule(tier=st.sampled_from(Tier), data=st.data())
    def lose(self, tier: Tier, data: st.DataObject) -> None:
        """A unit is damaged, or gone, and whatever stands on it stays."""
        if keys := sorted(self.resident[tier] - self.held[tier]):
            key = data.draw(st.sampled_from(keys))
            location = self.tree.locate(key)
            assert location is not None
            self.tree.remove(location.node, 1 << location.unit, tier)
            self.resident[tier].remove(key)
            self.is_connected = False

    @rule(tier=st.sampled_from(Tier))
    def evict_anything(self, tier: Tier) -> None:
        evicted = self.tree.evict_anything(tier)
        free = self.resident[tier] - self.held[tier]
        assert (evicted is None) == (not free)
        if evicted is not None:
            (unit,) = units_in([evicted])
            assert unit.slot == unit.key in free
            self.resident[tier].remove(unit.key)
            self.is_connected = False

    @rule(doc_ids=st.sets(st.sampled_from([*LENGTHS, *map(str.lower, LENGTHS)]), min_size=1, max_size=2))
    def forget(self, doc_ids: set[str]) -> None:
        """Documents go from all tiers, wherever they are, with what follows them, and nothing else does."""
        firsts = {key for name in doc_ids for key in self.named[name]}
        gone = {key for t in Tier for key in self.resident[t] if any(key[: len(first)] == first for first in firsts)}
        tops = self.tree.named(doc_ids)
        units = {key for top in tops for node in top.below() for key in node.keys}
        self.retention.on_forgotten(units)
        self.kept = {end: entry for end, entry in self.kept.items() if end not in units}
        assert gone == units & {key for t in Tier for key in self.resident[t]}
        for tier in Tier:
            for node in [node for top in tops for node in top.below()]:
                self.tree.release_units(node, node.full_mask, tier)
                self.tree.remove(node, node.full_mask, tier)
            self.resident[tier] -= gone
            self.held[tier] -= gone
        self.tree.forget(tops)
        assert all(not node.frequency for top in self.tree.named(doc_ids) for node in top.below())

    @rule()
    def start_again(self) -> None:
        """What the disk holds grows again, parents first; what has lost its prefix does not."""
        frequency: dict[Key, int] = {}
        stored: dict[Key, tuple[str | None, frozenset[str]]] = {}
        for key in sorted(self.resident[Tier.DISK], key=len):
            location = self.tree.locate(key)
            assert location is not None
            before = self.tree.key_before(location)
            assert before == (key[:-1] or None)
            if before is None or before in stored:
                stored[key] = location.node.doc_id, location.node.other_ids
                frequency[key] = location.node.frequency
        orphans = self.resident[Tier.DISK] - stored.keys()
        named = {name: {key for key in keys if key in stored} for name, keys in self.named.items()}
        self._begin()
        self.named = named
        for key, names in stored.items():
            node = self.tree.attach(key[:-1] or None, key, 1, *names)
            assert node is not None
            assert node.keys[-1] == key
            self._add(Location(node, len(node.keys) - 1), Tier.DISK)
            self.tree.restore(node, frequency=frequency[key], cost_s=1e-3)
            assert node.frequency >= frequency[key]
        for key in sorted(orphans, key=len):
            assert self.tree.attach(key[:-1], key, 1, None) is None

    @invariant()
    def the_tree_is_sound_and_holds_what_the_model_holds(self) -> None:
        assert self.tree.num_replicated_units <= self.max_replicated
        check_invariants(self.tree, is_connected=self.is_connected)
        for tier in Tier:
            found = {
                key
                for node in self.tree.nodes()
                for i, key in enumerate(node.keys)
                if self.tree.resident_mask(node, tier) >> i & 1
            }
            assert found == self.resident[tier]
            slots = self.tree.tiers[tier].slots
            assert {key for node in self.tree.nodes() for key in slots[node.id] or () if key is not None} == found
            in_use: Counter[int] = Counter()
            for key in self.held[tier]:
                location = self.tree.locate(key)
                assert location is not None
                in_use[location.node.id] += 1 << location.unit
            assert self.tree.tiers[tier].in_use == in_use
        assert self.retention.num_units == self._num_units([*self.kept]) <= RETAINED_UNITS
        for key in (*self.retained, *self.protected, *self.kept):
            assert self.tree.locate(key) is not None
        for node in self.tree.nodes():
            needed = any(at.node.path()[: len(node.path())] == node.path() for at in self._protected_places())
            assert self.tree.is_protected(node) == needed

    @invariant()
    def names_last_as_long_as_nodes_do(self) -> None:
        self.named = {name: {key for key in keys if self.tree.locate(key)} for name, keys in self.named.items()}
        for name, keys in self.named.items():
            assert all(at.node.is_named({name}) for key in keys if (at := self.tree.locate(key)) is not None)

    @invariant()
    def leading_tokens_are_those_before_the_first_gap(self) -> None:
        for node in self.tree.nodes():
            keys = [key for step in node.path() for key in step.keys]
            missing = [i for i, key in enumerate(keys) if not any(key in self.resident[t] for t in Tier)]
            assert self.tree.num_leading_tokens(node) == (missing[0] if missing else len(keys))

    @invariant()
    def listeners_are_notified_of_every_changed_node(self) -> None:
        now = {(tier, key) for tier in Tier for key in self.resident[tier]}
        for _, key in now ^ self.seen:
            location = self.tree.locate(key)
            assert location is None or location.node in self.changed
        self.seen = now
        self.changed.clear()

    def _protected_places(self) -> list[Location]:
        return [at for key in (*self.protected, *self.kept) if (at := self.tree.locate(key)) is not None]


TreeMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestTree = TreeMachine.TestCase
