"""A queue of nodes and how many tokens it holds: what S3-FIFO and ARC are made of."""

from __future__ import annotations

from collections import OrderedDict


class TokenQueue:
    """Nodes by their ids, the first that came first, with their sizes.

    Attributes:
        num_tokens: of all of them.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self._sizes: OrderedDict[int, int] = OrderedDict()

    def __contains__(self, node_id: int) -> bool:
        return node_id in self._sizes

    def put(self, node_id: int, num_tokens: int) -> None:
        """Put a node last; one that is here keeps its place, and has another size."""
        self.num_tokens += num_tokens - self._sizes.get(node_id, 0)
        self._sizes[node_id] = num_tokens

    def take(self, node_id: int) -> int | None:
        """Take a node out, and return its size; None if it is not here."""
        num_tokens = self._sizes.pop(node_id, None)
        self.num_tokens -= num_tokens or 0
        return num_tokens

    def shorten(self, num_tokens: int) -> None:
        """Drop the first nodes while there are more than ``num_tokens`` tokens."""
        while self._sizes and self.num_tokens > num_tokens:
            self.take(next(iter(self._sizes)))
