"""Pinned documents: their prefixes are evicted last, in each tier.

A pin applies to a document under all present and later prefixes. It outlives the document's eviction, which happens
only if all other blocks are pinned or belong to queued requests, and ends with the engine. Documents of several tenants
may have the same id: each tenant's pins are limited by its share of the tiers, separately from the operator's.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ragcache_core.errors import ConfigError
from ragcache_core.types import DocId

if TYPE_CHECKING:
    from ragcache_core.tree import KnowledgeTree, TreeNode

_EVICTED_AT_ONCE: Final = 64
"""Protected paths that a used path without spare capacity looks at, for evicted ones that give way."""


@dataclass(slots=True)
class _Counted:
    """A node on protected prefixes: their number, and its blocks as counted for a tenant."""

    num_paths: int
    num_units: int
    tenant: str | None


class Pins:
    """Protects the prefixes of pinned documents in the tree, up to ``limit`` blocks per tenant.

    Protecting or releasing a prefix costs O(height), independent of the number of protected ones.

    Args:
        tree: the knowledge tree.
        limit: returns the maximum number of pinned blocks of a tenant (``None``: of all others).
        describe: returns a number of blocks as text, and the source of the limit, for errors.
        tenant_of: returns the tenant of a prefix, from its last node's owner; ``None`` without one.
    """

    def __init__(
        self,
        tree: KnowledgeTree,
        limit: Callable[[str | None], int],
        describe: Callable[[int], str],
        tenant_of: Callable[[str | None], str | None] = lambda _: None,
    ) -> None:
        self._tree = tree
        self._limit = limit
        self._describe = describe
        self._tenant_of = tenant_of
        self.doc_ids: set[DocId] = set()
        self._ends: dict[str | None, dict[Hashable, None]] = {}  # the last unit of each protected path, by tenant
        self._counted: dict[int, _Counted] = {}  # by node id
        self._num_units: dict[str | None, int] = {}
        tree.split_listeners.append(self._on_split)

    @property
    def num_units(self) -> int:
        """Number of blocks of all pinned prefixes without a tenant, each once."""
        return self._num_units.get(None, 0)

    def check(self, doc_ids: Iterable[DocId]) -> Generator[int, None, set[DocId]]:
        """Return the documents that have cached KV, in slices; see :meth:`pin`."""
        return (yield from self._find(doc_ids))[0]

    def pin(self, doc_ids: Iterable[DocId]) -> Generator[int, None, set[DocId]]:
        """Pin documents, cached or not, and return all of them.

        Raises:
            ConfigError: their paths, without those of tenants, exceed the limit; none is pinned.
        """
        _, ends = yield from self._find(doc_ids)
        self.doc_ids.update(doc_ids)
        for end in ends:
            self._protect_within_limit(end)
            location = self._tree.locate(end)
            yield 1 if location is None else len(location.node.path())
        return set(doc_ids)

    def unpin(self, doc_ids: Iterable[DocId]) -> Generator[int, None, set[DocId]]:
        """Unpin documents, and return those that were pinned."""
        gone = self.doc_ids.intersection(doc_ids)
        self.doc_ids -= gone
        for doc_id in gone:
            for node in tuple(self._tree.nodes_of(doc_id)):
                self._release_unpinned(node)
                yield 1
        return gone

    def on_used(self, path: Sequence[TreeNode]) -> None:
        """Protect the pinned nodes of a used prefix, within the limit."""
        last = next((node for node in reversed(path) if node.is_named(self.doc_ids) and not node.is_private), None)
        if last is None or self._protect_within_limit(last.keys[-1]):
            return
        if self._release_evicted(self._tenant_of(last.owner), _EVICTED_AT_ONCE):
            self._protect_within_limit(last.keys[-1])

    def on_forgotten(self, doc_ids: Iterable[DocId], units: Set[Hashable]) -> None:
        """Unpin documents, and remove the protection of blocks that are about to be deleted."""
        doc_ids = tuple(doc_ids)
        self.doc_ids.difference_update(doc_ids)
        for doc_id in doc_ids:
            for node in tuple(self._tree.nodes_of(doc_id)):
                self._release_unpinned(node)
        for unit in units if self._counted else ():
            self._release(unit)

    def _find(self, doc_ids: Iterable[DocId]) -> Generator[int, None, tuple[set[DocId], list[Hashable]]]:
        """Return which documents are cached, and the ends of their prefixes if these may be pinned."""
        wanted = set(doc_ids)
        found: set[DocId] = set()
        ends: list[Hashable] = []
        new: dict[int, int] = {}
        for doc_id in wanted:
            for node in tuple(self._tree.nodes_of(doc_id)):
                if self._tree.contains(node) and node.stored_s is not None and not node.is_private:
                    found.add(doc_id)
                    ends.append(node.keys[-1])
                    if self._tenant_of(node.owner) is None:
                        new.update(uncounted := self._uncounted(node, new))
                        yield len(uncounted)
                yield 1
        limit = self._limit(None)
        if self.num_units + sum(new.values()) > limit:
            for _ in range(len(self._ends.get(None, ()))):
                self._release_evicted(None, 1)
                yield 1
        if (num_units := self.num_units + sum(new.values())) > limit:
            raise ConfigError(
                f"with these {len(wanted)} documents and their paths, {self._describe(num_units)} would be pinned "
                f"({self._describe(self.num_units)} are), and the limit is {self._describe(limit)}: pin fewer, "
                "unpin others, or start with a larger CacheConfig.pinned_share"
            )
        return found, ends

    def _uncounted(self, last: TreeNode, known: dict[int, int] | None = None) -> dict[int, int]:
        """Return the blocks on a prefix that are on no protected one, by node, up to those in ``known``."""
        found: dict[int, int] = {}
        node: TreeNode | None = last
        while node is not None and node.parent is not None and node.id not in self._counted:
            if known is not None and node.id in known:
                break
            found[node.id] = len(node.keys)
            node = node.parent
        return found

    def _protect_within_limit(self, end: Hashable) -> bool:
        """Protect the prefix that ends in a block within the limit, and return whether it is protected."""
        if (location := self._tree.locate(end)) is None:
            return False
        node = location.node
        tenant = self._tenant_of(node.owner)
        ends = self._ends.setdefault(tenant, {})
        if end in ends:
            return True
        num_units = self._num_units.get(tenant, 0) + sum(self._uncounted(node).values())
        if num_units > self._limit(tenant):
            return False
        for step in node.path():
            counted = self._counted.setdefault(step.id, _Counted(0, len(step.keys), tenant))
            counted.num_paths += 1
        ends[end] = None
        self._num_units[tenant] = num_units
        self._tree.protect(end)
        return True

    def _release(self, end: Hashable) -> None:
        """Undo :meth:`_protect_within_limit`; ignore a block at which no protected prefix ends."""
        if (location := self._tree.locate(end)) is None:
            return
        tenant = self._tenant_of(location.node.owner)
        if end not in (ends := self._ends.get(tenant, {})):
            return
        del ends[end]
        for step in location.node.path():
            counted = self._counted[step.id]
            counted.num_paths -= 1
            if not counted.num_paths:
                del self._counted[step.id]
                self._num_units[counted.tenant] -= counted.num_units
        self._tree.unprotect(end)

    def _release_unpinned(self, node: TreeNode) -> None:
        """Release the prefixes that end in a node, unless it belongs to another pinned document too."""
        if self._tree.contains(node) and node.id in self._counted and not node.is_named(self.doc_ids):
            for key in tuple(node.keys):
                self._release(key)

    def _release_evicted(self, tenant: str | None, num_paths: int) -> bool:
        """Release evicted ones of a tenant's next protected prefixes, and return whether there were any."""
        ends = self._ends.get(tenant, {})
        is_released = False
        for _ in range(min(num_paths, len(ends))):
            end = next(iter(ends))
            location = self._tree.locate(end)
            assert location is not None, "what is protected stays in the tree"
            if location.node.stored_s is None:
                self._release(end)
                is_released = True
            else:
                del ends[end]
                ends[end] = None  # the next call looks at others
        return is_released

    def _on_split(self, node: TreeNode, lower: TreeNode) -> None:
        if (counted := self._counted.get(node.id)) is None:
            return
        ends = self._ends.get(self._tenant_of(node.owner), {})
        num_below = counted.num_paths - sum(key in ends for key in node.keys)
        num_units = max(counted.num_units - len(node.keys), 0)
        counted.num_units -= num_units
        if num_below:
            self._counted[lower.id] = _Counted(num_below, num_units, counted.tenant)
        else:
            self._num_units[counted.tenant] -= num_units
