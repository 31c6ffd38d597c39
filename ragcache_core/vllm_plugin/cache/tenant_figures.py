"""Statistics of each tenant, which only that tenant sees, and each owner's share of every tier."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import eq
from typing import TYPE_CHECKING

from ragcache_core.runtime.tenants import Tenants, cache_salt_for, mark_of
from ragcache_core.tree import KnowledgeTree, TreeNode
from ragcache_core.types import DocId, Origin, Tier
from ragcache_core.vllm_plugin.cache.document_usage import DocumentUses
from ragcache_core.vllm_plugin.cache.prefix_publisher import PrefixPublisher
from ragcache_core.vllm_plugin.cache.request_state import RequestState

if TYPE_CHECKING:
    from ragcache_core.vllm_plugin.cache.controller import TierReport


@dataclass(slots=True)
class _Tenant:
    uses: DocumentUses
    paths: PrefixPublisher
    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_tokens_by_tier: list[int] = field(default_factory=lambda: [0] * len(Origin))


class TenantFigures:
    """The tenants and collections of an engine; false if there are none, and then nothing is counted."""

    def __init__(self, tree: KnowledgeTree, tokens_per_block: int, tenants: Tenants | None) -> None:
        self._tree = tree
        self._tenants = tenants
        self._by_name = {
            name: _Tenant(
                DocumentUses(tree, partial(eq, name)),
                PrefixPublisher(tree, tokens_per_block, is_own=partial(_is_owned, name)),
            )
            for name in (() if tenants is None else tenants.by_name)
        }
        self._by_mark = {mark_of(name): name for name in self._by_name}

    def __bool__(self) -> bool:
        return self._tenants is not None

    def of_salt(self, salt: str | None) -> str | None:
        """Return the tenant of a salt; ``None`` for other salts."""
        return self._by_mark.get((salt or "").rpartition("-")[0])

    def is_own_salt(self, tenant: str | None, salt: str | None) -> bool:
        """Return whether a salt is exactly a tenant's, without a salt of the request."""
        return (
            self._tenants is not None
            and tenant is not None
            and salt == cache_salt_for(tenant, secret=self._tenants.secret)
        )

    def owner_of(self, tenant: str | None, doc_id: DocId | None) -> str | None:
        """Return the owner of a document's blocks: the request's tenant, or else the document's collection."""
        if tenant is not None or doc_id is None or self._tenants is None:
            return tenant
        return self._tenants.collection_of(doc_id)

    def tenant_of(self, owner: str | None) -> str | None:
        """Return the tenant of an owner; ``None`` for a collection and for no owner."""
        return owner if owner in self._by_name else None

    def is_everybodys(self, owner: str | None) -> bool:
        """Return whether requests without a tenant own it, alone or with a collection; false for former owners."""
        return owner is None or (self._tenants is not None and owner in self._tenants.collections)

    def num_units_of(self, tenant: str | None, tier: Tier, num_units: int) -> int:
        """Return the number of a tier's blocks in a tenant's share; ``None``: the share without a tenant."""
        shares = self._tree.tiers[tier].shares
        return num_units - sum(map(shares.share_of, self._by_name)) if tenant is None else shares.share_of(tenant)

    def divide(self, tier: Tier, report: TierReport, blocks_per_unit: int) -> None:
        """Give every tenant and collection its share of a tier.

        Raises:
            ConfigError: a quota is more than all of it.
        """
        if self._tenants is None or not report.block_bytes:
            return
        num_units, capacity_bytes = report.num_blocks // blocks_per_unit, report.capacity_bytes
        setting = "kv_cache_bytes" if tier is Tier.GPU else f"{tier.label}_bytes"
        self._tenants.check_fit(tier, capacity_bytes, setting)
        limits = {name: owner.quota.of(tier) for name, owner in self._tenants.owners.items()}
        quotas: dict[str | None, int] = {
            name: limit * num_units // capacity_bytes for name, limit in limits.items() if limit is not None
        }
        self._tree.tiers[tier].shares.divide(num_units, self._tenants.weights(), quotas)

    def on_admitted(self, state: RequestState) -> None:
        """Count the cached tokens of a tenant's prompt."""
        if (tenant := self._by_name.get(state.tenant or "")) is not None:
            for tier, num_tokens in enumerate(state.num_tokens_by_tier):
                tenant.num_tokens_by_tier[tier] += num_tokens

    def on_request(self, state: RequestState) -> None:
        """Count a tenant's real request."""
        if (tenant := self._by_name.get(state.tenant or "")) is not None:
            tenant.num_requests += 1
            tenant.num_prompt_tokens += state.num_prompt_tokens

    def document_uses(self, name: str) -> DocumentUses:
        """Return the counts of a tenant's documents."""
        return self._by_name[name].uses

    def paths(self, name: str) -> PrefixPublisher:
        """Return the publisher of cached prefixes of a tenant's documents."""
        return self._by_name[name].paths

    def forget(self, doc_ids: Iterable[DocId]) -> None:
        """Drop the counts of deleted documents."""
        for tenant in self._by_name.values():
            tenant.uses.forget(doc_ids)

    def forget_all(self) -> None:
        """Reset the counts of all documents."""
        for tenant in self._by_name.values():
            tenant.uses.clear()

    def drop_unread(self) -> None:
        """Stop following the tree for tenants whose changes are no longer read."""
        for tenant in self._by_name.values():
            tenant.paths.drop_unread()

    def report(
        self, tiers: Mapping[Tier, TierReport], blocks_per_unit: int, *, has_documents: bool
    ) -> dict[str, dict[str, object]]:
        """Return each tenant's part of the engine's report, with the most used documents on request."""
        return {
            name: {
                "num_requests": tenant.num_requests,
                "num_prompt_tokens": tenant.num_prompt_tokens,
                "tiers": [
                    {
                        **self._tier_report(name, tier, report, blocks_per_unit),
                        "num_hit_tokens": tenant.num_tokens_by_tier[tier],
                    }
                    for tier, report in sorted(tiers.items())
                ],
                **({"hottest_documents": tenant.uses.hottest()} if has_documents else {}),
            }
            for name, tenant in self._by_name.items()
        }

    def report_collections(
        self, tiers: Mapping[Tier, TierReport], blocks_per_unit: int
    ) -> dict[str, dict[str, object]]:
        """Return each collection's usage of the tiers."""
        return {
            name: {"tiers": [self._tier_report(name, *each, blocks_per_unit) for each in sorted(tiers.items())]}
            for name in (() if self._tenants is None else self._tenants.collections)
        }

    def _tier_report(self, name: str, tier: Tier, report: TierReport, blocks_per_unit: int) -> dict[str, object]:
        assert self._tenants is not None
        shares = self._tree.tiers[tier].shares
        num_blocks = shares.owned.get(name, 0) * blocks_per_unit
        limit = self._tenants.owners[name].quota.of(tier)
        return {
            "name": tier.label,
            "capacity_bytes": report.capacity_bytes if limit is None else limit,
            "used_bytes": num_blocks * report.block_bytes,
            "num_blocks": num_blocks,
            "num_evicted_blocks": shares.evicted.get(name, 0) * blocks_per_unit,
            "is_enabled": report.is_enabled,
        }


def _is_owned(name: str, node: TreeNode) -> bool:
    return node.owner == name
