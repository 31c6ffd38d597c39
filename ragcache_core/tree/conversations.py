"""Recognise turns of one conversation by their tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final

from ragcache_core.policy.returning import NextTurnModel

_MAX_TURNS: Final = 65_536
"""Turns that are remembered, the latest."""


@dataclass(slots=True)
class _Turn:
    number: int
    num_requests: int
    has_returned: bool = False


class Conversations:
    """Turns by the unit in which the question ends; a later prompt that contains it continues the conversation.

    No user and no application says which conversation a request belongs to. A whole earlier prompt with the beginning
    of its answer says it. An answer too short to fill that block identifies no conversation, and then little is lost.
    """

    def __init__(self, returning: NextTurnModel) -> None:
        """Take ``returning``, which is updated with every turn."""
        self._returning = returning
        self._turns: OrderedDict[Hashable, _Turn] = OrderedDict()

    def turn_of(self, keys: Sequence[Hashable]) -> int:
        """Return the turn number, from 1 on, of a prompt of these units."""
        before = self._before(keys)
        return 1 if before is None else before.number + 1

    def on_access(self, keys: Sequence[Hashable], num_requests: int) -> int:
        """Record that a prompt of these units is the tree's ``num_requests``-th request, and return :meth:`turn_of`."""
        before = self._before(keys)
        if before is not None and not before.has_returned:
            before.has_returned = True
            self._returning.on_return(before.number, num_requests - before.num_requests)
        self._returning.refresh()
        return 1 if before is None else before.number + 1

    def on_answered(self, key: Hashable, turn: int, num_requests: int) -> None:
        """Record the answer of ``turn``, which begins in the unit ``key``, at the tree's request ``num_requests``."""
        if key not in self._turns:
            self._returning.on_turn(turn, num_requests)
            self._turns[key] = _Turn(turn, num_requests)
            if len(self._turns) > _MAX_TURNS:
                self._turns.popitem(last=False)

    def _before(self, keys: Sequence[Hashable]) -> _Turn | None:
        turns = self._turns
        if turns.keys().isdisjoint(keys):
            return None
        return next((turns[key] for key in reversed(keys) if key in turns), None)
