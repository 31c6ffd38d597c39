"""Deletion of documents from every tier and every chunk, with all KV that depends on them.

Unused KV is deleted at once. A request in the engine keeps its blocks, but no other request hits them, and no further
KV of it is stored. KV that a disk reads or writes is deleted when the transfer has ended::

    forget -> every holder deletes what it can -> [requests end, transfers end, the disk is overwritten] -> deleted

Documents are known by the ids that requests gave them in their spans. The same tokens under several ids are one
document with several ids: deletion of one id deletes the KV of all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, cast

from ragcache_core.tree import KnowledgeTree, TreeNode
from ragcache_core.types import DocId, SegmentKind, Tier
from ragcache_core.vllm_plugin.cache.request_state import Key, RequestState

if TYPE_CHECKING:
    from collections.abc import Set

    from ragcache_core.vllm_plugin.cache.pins import Pins

_FEW_APPROXIMATE = 1024
"""First blocks of approximate KV that are kept before deleted ones are removed from the set."""


@dataclass(frozen=True, slots=True)
class Forgotten:
    """What a holder must delete.

    Attributes:
        doc_ids: the documents.
        units: of the tree: those of the documents and their descendants, parents first.
        requests: ids of requests in the engine that use some of it, with the index of the first such block.
        is_all: delete everything, also what has no document or unit.
    """

    doc_ids: Set[DocId]
    units: Collection[Key]
    requests: Mapping[str, int]
    is_all: bool = False


@dataclass(slots=True)
class Freed:
    """What a holder deleted or will delete once it is released: blocks and bytes by tier, chunk versions, known ids."""

    num_blocks: dict[Tier, int] = field(default_factory=dict)
    num_bytes: dict[Tier, int] = field(default_factory=dict)
    num_variants: int = 0
    doc_ids: set[DocId] = field(default_factory=set)

    def add(self, other: Freed) -> None:
        """Add what another holder deleted."""
        for mine, theirs in ((self.num_blocks, other.num_blocks), (self.num_bytes, other.num_bytes)):
            for tier, number in theirs.items():
                mine[tier] = mine.get(tier, 0) + number
        self.num_variants += other.num_variants
        self.doc_ids |= other.doc_ids


class Holder(Protocol):
    """A tier, or another owner of documents' KV."""

    def forget(self, forgotten: Forgotten) -> Freed:
        """Delete KV, or hide it until it is released; return how much that is."""
        ...

    def num_pending(self) -> int:
        """Delete what can be deleted now, and return how many blocks to be deleted are still here."""
        ...

    def deletion_problem(self) -> str | None:
        """Return why some KV may never be deleted here, with a hint; None if there is none."""
        ...


@dataclass(frozen=True, slots=True)
class OutOfReach:
    """A holder that cannot be reached: any KV may be left there."""

    why: str

    def forget(self, forgotten: Forgotten) -> Freed:
        """Delete nothing."""
        return Freed()

    def num_pending(self) -> int:
        """Return 0: the number is unknown."""
        return 0

    def deletion_problem(self) -> str:
        """Return why."""
        return self.why


def why_on_disk(folders: Iterable[object], disk: str = "the disk tier") -> str:
    """Return why a disk that is out of service may still hold deleted KV, with a hint."""
    names = ", ".join(map(str, folders))
    return f"{disk} is out of service, and may serve it again after the next start: before that, delete {names}"


def why_in_store(url: str) -> str:
    """Return why a shared store that is no longer used may still hold deleted KV."""
    return f"the shared store {url} is used no more, and may have it: delete it there, or wait until it does"


class Forgetting:
    """Deletes documents from all holders, and counts what is left of them.

    Args:
        tree: locates the documents.
        requests: the requests in the engine, by id.
        tokens_per_block: tokens of a unit.
        pins: loses the pins of deleted documents.

    Attributes:
        store_at_most: limits how many tokens of a request are stored below the GPU; None without lower tiers.
    """

    def __init__(
        self, tree: KnowledgeTree, requests: Mapping[str, RequestState], tokens_per_block: int, pins: Pins
    ) -> None:
        self._tree = tree
        self._pins = pins
        self._requests = requests
        self._tokens_per_block = tokens_per_block
        self._holders: list[Holder] = []
        self._is_waiting = False
        self._approximate: set[Key] = set()
        self._most_approximate = _FEW_APPROXIMATE
        self.store_at_most: Callable[[str, int], None] | None = None

    @property
    def holders(self) -> tuple[Holder, ...]:
        """The holders, in the order in which they were added."""
        return tuple(self._holders)

    def add_holder(self, holder: Holder) -> None:
        """Add an owner of KV."""
        self._holders.append(holder)

    def remove_holder(self, holder: Holder, *, deletion_problem: str | None = None) -> None:
        """Remove a holder that is out of service; ``deletion_problem`` says why it may still hold deleted KV."""
        if holder in self._holders:
            self._holders.remove(holder)
            if deletion_problem is not None:
                self.add_holder(OutOfReach(deletion_problem))

    def on_approximated(self, key: Key) -> None:
        """Record the first block of approximate KV.

        Its position does not say which documents it depends on, so any deletion of a document deletes it.
        """
        self._approximate.add(key)
        if len(self._approximate) > self._most_approximate:
            self._approximate_nodes()
            self._most_approximate = max(2 * len(self._approximate), _FEW_APPROXIMATE)

    def forget(self, doc_ids: Set[DocId]) -> dict[str, object]:
        """Delete documents, and return the receipt; see :class:`~ragcache_core.stats.ForgetReceipt`."""
        return self._delete(_tops([*self._tree.named(doc_ids), *self._approximate_nodes()]), doc_ids)

    def forget_approximate(self) -> None:
        """Delete all approximate KV: it may depend on KV that has expired."""
        self.forget_nodes(self._approximate_nodes())

    def forget_all(self) -> dict[str, object]:
        """Delete everything, and return the receipt."""
        tops = list(self._tree.root.iter_children())
        named = {name for top in tops for node in top.below() for name in (node.doc_id, *node.other_ids)}
        return self._delete(tops, {name for name in named if name is not None} | self._pins.doc_ids, is_all=True)

    def forget_nodes(self, nodes: Iterable[TreeNode]) -> None:
        """Delete nodes and their descendants; other nodes of their documents stay."""
        if tops := _tops(nodes):
            self._delete(tops, frozenset())

    def _approximate_nodes(self) -> list[TreeNode]:
        places = {key: at for key in self._approximate if (at := self._tree.locate(key)) is not None}
        self._approximate = set(places)
        return [at.node for at in places.values()]

    def _delete(self, tops: Sequence[TreeNode], doc_ids: Set[DocId], *, is_all: bool = False) -> dict[str, object]:
        nodes = [node for top in tops for node in top.below()]
        units = [cast("Key", key) for node in nodes for key in node.keys]
        named = {name for node in nodes for name in (node.doc_id, *node.other_ids)}
        freed = Freed(doc_ids={doc_id for doc_id in doc_ids if doc_id in named})
        all_units = frozenset(units)
        concerned = self._concerned(doc_ids, tops, freed)
        if is_all:  # a prompt without a full block has no unit yet
            concerned = dict.fromkeys(self._requests, 0)
        forgotten = Forgotten(doc_ids, units, concerned, is_all)
        self._pins.on_forgotten(doc_ids, all_units)
        for request_id, first_block in forgotten.requests.items():
            state = self._requests[request_id]
            state.has_forgotten |= bool(doc_ids) or is_all  # expired KV is no secret
            state.apart = ()
            if state.first_private is None or first_block < state.first_private:
                state.first_private = first_block
                if self.store_at_most is not None:
                    self.store_at_most(request_id, first_block * self._tokens_per_block)
        for holder in self._holders:
            freed.add(holder.forget(forgotten))
        self._is_waiting = True
        num_paths = sum(
            node.is_named(doc_ids) and not (node.parent is not None and node.doc_id == node.parent.doc_id)
            for node in nodes
        )
        self._tree.forget(tops)
        return {
            "forgotten": sorted(freed.doc_ids),
            "num_paths": num_paths,
            "num_variants": freed.num_variants,
            "num_blocks": {tier.label: number for tier, number in sorted(freed.num_blocks.items())},
            "num_bytes": {tier.label: number for tier, number in sorted(freed.num_bytes.items())},
        }

    def left(self) -> dict[str, object]:
        """Delete what can be deleted now, and return what is left of all deletions so far."""
        return {
            "num_requests": sum(state.has_forgotten for state in self._requests.values()),
            "num_blocks": sum(holder.num_pending() for holder in self._holders),
            "problems": [why for holder in self._holders if (why := holder.deletion_problem()) is not None],
        }

    def sweep(self) -> None:
        """Delete what could not be deleted before and can be now."""
        if self._is_waiting:
            self._is_waiting = sum(holder.num_pending() for holder in self._holders) > 0

    def _concerned(self, doc_ids: Set[DocId], tops: Iterable[TreeNode], freed: Freed) -> dict[str, int]:
        """Return the requests in the engine that use deleted KV, each with its first such block.

        Keys are chained: a request has a block at or below a top node exactly where it has that node's first block.
        """
        starts: dict[int, set[Key]] = {}
        for top in tops:
            starts.setdefault(top.start, set()).add(cast("Key", top.keys[0]))
        first: dict[str, int] = {}
        for request_id, state in self._requests.items():
            documents = [s for s in state.metadata.segments if s.kind is SegmentKind.DOCUMENT and s.doc_id in doc_ids]
            freed.doc_ids.update(cast("DocId", document.doc_id) for document in documents)
            blocks = [document.start // self._tokens_per_block for document in documents[:1]]
            keys = state.apart or state.keys
            blocks += [min((i for i, own in starts.items() if i < len(keys) and keys[i] in own), default=len(keys))]
            if documents or blocks[-1] < len(keys):
                first[request_id] = min(blocks)
        return first


def _tops(nodes: Iterable[TreeNode]) -> list[TreeNode]:
    """Return those of ``nodes`` that are no descendants of others of them."""
    chosen = {node.id: node for node in nodes}
    return [node for node in chosen.values() if not any(step.id in chosen for step in node.path()[:-1])]
