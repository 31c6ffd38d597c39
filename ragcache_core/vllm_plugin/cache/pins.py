"""Pinned documents: their prefixes are evicted last, in each tier.

A pin applies to a document under all present and later prefixes. It outlives the document's eviction, which happens
only if all other blocks are pinned or belong to queued requests, and ends with the engine. Documents of several tenants
may have the same id: each tenant's pins are limited by its share of the tiers, separately from the operator's.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterable, Sequence, Set
from typing import TYPE_CHECKING, Final

from ragcache_core.errors import ConfigError
from ragcache_core.tree.protected_paths import ProtectedPaths
from ragcache_core.types import DocId

if TYPE_CHECKING:
    from ragcache_core.tree import KnowledgeTree, TreeNode

_EVICTED_AT_ONCE: Final = 64
"""Protected paths that a used path without spare capacity looks at, for evicted ones that give way."""


class Pins:
    """Protects the prefixes of pinned documents in the tree, up to ``limit`` blocks per tenant.

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
        self._paths = ProtectedPaths(tree, limit, tenant_of)
        self._describe = describe
        self.doc_ids: set[DocId] = set()

    @property
    def num_units(self) -> int:
        """Blocks of all pinned paths but tenants', each once."""
        return self._paths.num_units_of(None)

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
            self._paths.protect(end)
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
        if last is None or self._paths.protect(last.keys[-1]):
            return
        if self._release_evicted(self._paths.tenant_of(last.owner), _EVICTED_AT_ONCE):
            self._paths.protect(last.keys[-1])

    def on_forgotten(self, doc_ids: Iterable[DocId], units: Set[Hashable]) -> None:
        """Unpin documents, and remove the protection of blocks that are about to be deleted."""
        doc_ids = tuple(doc_ids)
        self.doc_ids.difference_update(doc_ids)
        for doc_id in doc_ids:
            for node in tuple(self._tree.nodes_of(doc_id)):
                self._release_unpinned(node)
        for unit in units if self._paths else ():
            self._paths.release(unit)

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
                    if self._paths.tenant_of(node.owner) is None:
                        new.update(uncounted := self._paths.uncounted(node, new))
                        yield len(uncounted)
                yield 1
        limit = self._paths.limit(None)
        if self.num_units + sum(new.values()) > limit:
            for _ in range(len(self._paths.ends_of(None))):
                self._release_evicted(None, 1)
                yield 1
        if (num_units := self.num_units + sum(new.values())) > limit:
            raise ConfigError(
                f"with these {len(wanted)} documents and their paths, {self._describe(num_units)} would be pinned "
                f"({self._describe(self.num_units)} are), and the limit is {self._describe(limit)}: pin fewer, "
                "unpin others, or start with a larger CacheConfig.pinned_share"
            )
        return found, ends

    def _release_unpinned(self, node: TreeNode) -> None:
        """Release the paths that end in a node, unless it is another pinned document as well."""
        if self._tree.contains(node) and self._paths.is_counted(node) and not node.is_named(self.doc_ids):
            for key in tuple(node.keys):
                self._paths.release(key)

    def _release_evicted(self, tenant: str | None, num_paths: int) -> bool:
        """Look at the next protected paths of a tenant, release those evicted, and return whether any was."""
        ends = self._paths.ends_of(tenant)
        is_released = False
        for _ in range(min(num_paths, len(ends))):
            end = next(iter(ends))
            location = self._tree.locate(end)
            assert location is not None, "what is protected stays in the tree"
            if location.node.stored_s is None:
                self._paths.release(end)
                is_released = True
            else:
                del ends[end]
                ends[end] = None  # the next call looks at others
        return is_released
