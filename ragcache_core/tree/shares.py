"""How much of a tier each tenant or collection has, and who of them gives up units for others."""

from __future__ import annotations

from collections.abc import Mapping

Owner = str | None
"""A tenant, or a collection of documents; None are all that have none."""


class Shares:
    """Units of one tier by their owner, with what each may have.

    A full tier takes from those that have more than their share first, and from nobody so much that less than the share
    is left, as long as somebody else has more. A quota is never exceeded for long: who is at it gives up his own.

    Attributes:
        owned: units that lie in the tier, by owner.
        evicted: units that it gave up since the start, by owner.
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

        Who has no weight has no share: he has what others leave.
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
        """Count units that the tier gave up, or after all did not."""
        self.evicted[owner] = self.evicted.get(owner, 0) + num_units

    def share_of(self, owner: Owner) -> int:
        """Return how many units are an owner's when the tier is full."""
        return self._shares.get(owner, 0)

    def surplus(self, owner: Owner) -> int:
        """Return by how many units an owner has more than his share; below 0, less."""
        return self.owned.get(owner, 0) - self.share_of(owner)

    def over(self) -> frozenset[Owner]:
        """Return who has more than his share; O(owners)."""
        return frozenset(owner for owner in self.owned if self.surplus(owner) > 0)

    @property
    def quotas(self) -> Mapping[Owner, int]:
        """The most units that each owner with a limit may have."""
        return self._quotas

    def over_quota(self, owner: Owner, num_new: int = 0) -> int:
        """Return how many units an owner has to give up for ``num_new`` of his own to come; 0 where there is room."""
        quota = self._quotas.get(owner)
        return 0 if quota is None else max(self.owned.get(owner, 0) + num_new - quota, 0)
