"""The interface of replacement policies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from ragcache_core.policy.prefill_cost import PrefillCost
from ragcache_core.types import DocId


class NodeStats:
    """The statistics of one tree node, a policy's only input.

    Attributes:
        id: small integer, unique among present nodes: the index of the policy's own columns.
        num_tokens: size of the node; all KV of a model has the same bytes per token.
        frequency: number of accesses, including expected ones.
        num_expected: expected accesses in ``frequency``.
        total_cost_s: sum of the seconds charged to each of its tokens, over the requests that computed it, by
            :meth:`ReplacementPolicy.cost_per_token_s` (for PGDSF, RAGCache's Eq. 3 before the division by m).
        num_computed: number of those requests, m of Eq. 3.
        last_request: request count of the tree at its last access.
        is_transient: whether it is evicted before all other nodes (a document beyond ``max_cached_documents``).
        parent: the previous node of its prefix; ``None`` for the root.
        doc_id: id of its document, if it has one.
        turn: number of the latest turn of the only conversation with this history; 0 for other nodes.
        turn_kind: whose statistics say when that conversation continues
            (:class:`~ragcache_core.policy.returning.NextTurnModel`); 0 before the turn's answer.
    """

    __slots__ = (
        "doc_id", "frequency", "id", "is_transient", "last_request", "num_computed", "num_expected", "num_tokens",
        "parent", "total_cost_s", "turn", "turn_kind",
    )  # fmt: skip

    def __init__(
        self, node_id: int, num_tokens: int, parent: NodeStats | None = None, doc_id: DocId | None = None
    ) -> None:
        self.id = node_id
        self.num_tokens = num_tokens
        self.parent = parent
        self.doc_id = doc_id
        self.frequency = 0
        self.total_cost_s = 0.0
        self.num_computed = 0
        self.num_expected = 0
        self.last_request = 0
        self.is_transient = False
        self.turn = 0
        self.turn_kind = 0

    @property
    def num_uses(self) -> int:
        """Number of accesses."""
        return self.frequency - self.num_expected

    @property
    def avg_cost_s(self) -> float:
        """Mean seconds per token of this node (Cost/Size); 0 before its computation."""
        return self.total_cost_s / self.num_computed if self.num_computed else 0.0

    def copy_stats_to(self, other: NodeStats) -> None:
        """Copy the statistics, except id and size, to ``other``."""
        other.frequency = self.frequency
        other.total_cost_s = self.total_cost_s
        other.num_computed = self.num_computed
        other.num_expected = self.num_expected
        other.last_request = self.last_request
        other.is_transient = self.is_transient
        other.turn = self.turn
        other.turn_kind = self.turn_kind


class ReplacementPolicy(ABC):
    """Decides which of two nodes a tier evicts first.

    A rank is computed when a node is retrieved and stands until it is retrieved again: that lets a tier keep its
    nodes in a heap. Where the order changes between retrievals
    (:class:`~ragcache_core.policy.adaptive.ARCPolicy`), nodes are put in buckets in which it does not, and only the
    first of each bucket are compared, by :meth:`score`.
    """

    name: ClassVar[str]
    uses_clock: ClassVar[bool] = False
    """Whether a rank depends on the tier's clock; one that does not may be computed again at any time. A tree reads
    this and :attr:`copy_discount` once, when it is built."""
    is_selective: ClassVar[bool] = False
    """Whether a full host tier admits only nodes that rank above the evicted ones. Only for ranks without a clock."""
    copy_discount: ClassVar[float] = 0.0
    """By how much a node ranks lower in a tier while slower ones hold all of it as well: it would be loaded again and
    not computed. Only where ranks need no clock; 0: a tier does not look at those below."""

    @property
    def rank_ages(self) -> Sequence[int]:
        """Requests since a node's last access at which it is ranked again, as ranks fall at different rates.

        Empty always or never.
        """
        return ()

    def cost_per_token_s(self, prefill_cost: PrefillCost, num_cached_tokens: int, num_new_tokens: int) -> float:
        """Return the seconds that a request charges to each missed token: T(alpha, beta) / beta (Eq. 3).

        ``num_new_tokens`` are all that it had to compute, the question's included; none charge nothing.
        """
        if num_new_tokens <= 0:
            return 0.0
        return prefill_cost.estimate_s(num_cached_tokens, num_new_tokens) / num_new_tokens

    def on_access(self, stats: NodeStats, num_requests: int) -> None:  # noqa: B027 (most policies keep no numbers)
        """Update the policy's own data of an accessed node.

        ``stats.last_request`` is still that of the access before; ``stats.frequency`` counts this one already, and is
        1 for a node that is new, whatever node had its id before.
        """

    def on_restore(self, stats: NodeStats, num_requests: int) -> None:
        """Set the policy's own data of a node with ``stats.frequency`` accesses from storage or a forecast."""
        self.on_access(stats, num_requests)

    def on_split(self, stats: NodeStats, lower: NodeStats) -> None:  # noqa: B027
        """Copy the policy's own data from ``stats`` to ``lower``, a new node cut off from it."""

    def on_removed(self, stats: NodeStats) -> None:  # noqa: B027
        """Handle a node's removal from the tree; its id may be reused."""

    def on_document_removed(self, doc_id: DocId) -> None:  # noqa: B027
        """Handle the removal of a document's last node."""

    def on_arrival(self, stats: NodeStats) -> None:  # noqa: B027
        """Handle a node's entry into its first tier, after its access."""

    def on_departure(self, stats: NodeStats) -> None:  # noqa: B027
        """Handle a node's exit from its last tier, by eviction or deletion."""

    @abstractmethod
    def rank(self, stats: NodeStats, clock: float) -> float:
        """Return the rank of a node that was just accessed; the lowest is evicted first.

        ``clock`` is that of the tier (Eq. 2): the highest rank evicted so far.
        """

    def bucket(self, stats: NodeStats) -> int:
        """Return the bucket of a node; scores within one are in the order of ranks, at any time.

        Below 0: the lowest score is that of the lowest or of the highest rank.
        """
        return 0

    def score(self, stats: NodeStats, rank: float, num_requests: int) -> float:
        """Return the score by which buckets' first nodes are compared; the lowest is evicted first."""
        return rank
