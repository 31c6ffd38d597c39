"""How much of a tier each tenant or collection has, and whose units are evicted for others."""

from __future__ import annotations

from collections.abc import Mapping

Owner = str | None
"""A tenant, or a collection of documents; None are all that have none."""


class Shares:
    """Units of one tier by their owner, with what each may have.

    A full tier evicts from owners above their share first, and takes no owner below its share while another one is
    above. A quota is never exceeded for long: an owner at its quota evicts its own units.

    Attributes:
        owned: units that lie in the tier, by owner.
        evicted: units that it evicted since the start, by owner.
    """

    def __init__(self) -> None:
        self.owned: dict[Owner, int] = {}
        self.evicted: dict[Owner, int] = {}
        self._shares: dict[Owner, int] = {}
        self._quotas: dict[Owner, int] = {}

    def __bool__(self) -> bool:
        """Whether owners count at all."""
        return bool(self._shares)

    def divide(self, num_units: int, weights: Mapping[Owner, float], quotas: Mapping[Owner, int]) -> None:
        """Divide a tier of ``num_units`` by ``weights``; a quota, in units, is the most that an owner may have.

        An owner without a weight has no share: it uses what others leave.
        """
        total = sum(weights.values())
        self._quotas = dict(quotas)
        self._shares = {
            owner: min(int(num_units * weight / total), self._quotas.get(owner, num_units))
            for owner, weight in weights.items()
        }

    def count(self, owner: Owner, num_units: int) -> None:
        """Count units that came to the tier, or left it."""
        self.owned[owner] = self.owned.get(owner, 0) + num_units

    def count_evicted(self, owner: Owner, num_units: int) -> None:
        """Count evicted units; a negative number takes an eviction back."""
        self.evicted[owner] = self.evicted.get(owner, 0) + num_units

    def share_of(self, owner: Owner) -> int:
        """Return how many units are an owner's when the tier is full."""
        return self._shares.get(owner, 0)

    def excess(self, owner: Owner) -> int:
        """Return by how many units an owner has more than his share; below 0, less."""
        return self.owned.get(owner, 0) - self.share_of(owner)

    def owners_over_quota(self) -> frozenset[Owner]:
        """Return the owners above their share; O(owners)."""
        return frozenset(owner for owner in self.owned if self.excess(owner) > 0)

    @property
    def quotas(self) -> Mapping[Owner, int]:
        """The most units that each owner with a limit may have."""
        return self._quotas

    def num_over_quota(self, owner: Owner, num_new: int = 0) -> int:
        """Return how many of its units an owner must evict before it adds ``num_new``; 0 where they fit."""
        quota = self._quotas.get(owner)
        return 0 if quota is None else max(self.owned.get(owner, 0) + num_new - quota, 0)
