"""Operator calls in slices: the engine's steps run between two slices.

A call that visits many nodes of the tree is a generator. The server calls the engine with the same token until there is
an answer; each time the scheduler's thread visits a bounded number of nodes::

    advance("5f0c", contents.show(ids))  ->  {}                                  500 nodes of 1,200
    advance("5f0c", contents.show(ids))  ->  {}                                  500 more
    advance("5f0c", contents.show(ids))  ->  {"documents": [...], "total": 3}    the rest
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Final

NODES_AT_ONCE: Final = 500
"""Nodes that a slice looks at: a few milliseconds."""
_MAX_CALLS: Final = 32

Steps = Generator[int, None, dict[str, Any]]
"""An operator call: yields how many nodes it has looked at since its last yield, and returns its answer."""


class OperatorCalls:
    """Runs the operator calls of one engine.

    Of more than 32 calls that have not ended, or whose answer is kept, the oldest are dropped: their client is gone.
    """

    def __init__(self) -> None:
        self._calls: dict[str, Steps | dict[str, Any]] = {}

    def advance(self, token: str, begin: Steps, *, keeps_answer: bool = False) -> dict[str, Any]:
        """Run a slice of a call, and return its result, or ``{}`` while it continues.

        Args:
            token: names the call. ``begin`` starts with a token that is new, and is not used with a known one.
            begin: the call, not started.
            keeps_answer: whether the answer is asked for again, because other engines may still be at it.

        Raises:
            ConfigError: the call is refused.
        """
        call = self._calls.pop(token, begin)
        answer = call if isinstance(call, dict) else run_slice(call)
        if answer is None or keeps_answer:
            self._calls[token] = call if answer is None else answer
            if len(self._calls) > _MAX_CALLS:
                del self._calls[next(iter(self._calls))]
        return answer or {}


def run_slice(call: Steps) -> dict[str, Any] | None:
    """Let a call look at some nodes, and return its answer; None while there is more to do."""
    num_nodes = 0
    try:
        while num_nodes < NODES_AT_ONCE:
            num_nodes += next(call)
    except StopIteration as end:
        answer: dict[str, Any] = end.value
        return answer
    return None
