"""Recognise turns of one conversation by their tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Final

from ragcache_core.policy.returning import NextTurnModel, Turn

_MAX_TURNS: Final = 65_536
"""Turns that are remembered, the latest."""


class Conversations:
    """Turns by the unit in which the question ends; a later prompt that contains it continues the conversation.

    No user and no application says which conversation a request belongs to. A whole earlier prompt with the beginning
    of its answer says it. An answer too short to fill that block identifies no conversation, and then little is lost.
    """

    def __init__(self, returning: NextTurnModel) -> None:
        """Take ``returning``, which is updated with every turn."""
        self._returning = returning
        self._turns: OrderedDict[Hashable, Turn] = OrderedDict()

    def turn_of(self, keys: Sequence[Hashable]) -> int:
        """Return the turn number, from 1 on, of a prompt of these units."""
        before = self._before(keys)
        return 1 if before is None else before.number + 1

    def on_access(self, keys: Sequence[Hashable], num_requests: int) -> int:
        """Record that a prompt of these units is the tree's ``num_requests``-th request, and return :meth:`turn_of`."""
        before = self._before(keys)
        if before is not None and not before.has_returned:
            before.has_returned = True
            self._returning.on_return(before, num_requests - before.num_requests)
        self._returning.refresh()
        return 1 if before is None else before.number + 1

    def on_answered(self, key: Hashable, turn: int, num_requests: int, tool: str | None = None) -> int:
        """Record the answer of ``turn``, which begins in the unit ``key``, at the tree's request ``num_requests``.

        Return the turn's kind, by the ``tool`` that it calls. A later call may name it.
        """
        if (known := self._turns.get(key)) is None:
            known = self._turns[key] = Turn(turn, num_requests, self._returning.kind_of(turn, tool))
            self._returning.on_turn(known)
            if len(self._turns) > _MAX_TURNS:
                self._turns.popitem(last=False)
        elif tool is not None:
            known.kind = self._returning.kind_of(turn, tool)
        return known.kind

    def _before(self, keys: Sequence[Hashable]) -> Turn | None:
        turns = self._turns
        if turns.keys().isdisjoint(keys):
            return None
        return next((turns[key] for key in reversed(keys) if key in turns), None)
