"""Which jobs run in a step, and how many of their rows."""

from __future__ import annotations

from collections.abc import Sequence

from ragcache_core.vllm_plugin.chunks.messages import Slice
from ragcache_core.vllm_plugin.chunks.reuse_state import ReuseState

_GUESSED_TOKENS = 512
"""Tokens of a step's slices where all of them are speculative: a real arrival waits for the step to end."""


def cut_slices(
    requests: Sequence[tuple[str, ReuseState]], budget: int, *, max_runs: int, are_guesses: bool
) -> list[Slice]:
    """Return which jobs run in a step, and how many of their rows; the requests count them as done.

    Args:
        requests: the jobs that may run, the first ones first.
        budget: tokens that their slices may have.
        max_runs: runs of neighbouring tokens that they may have.
        are_guesses: whether all of them are speculative.
    """
    slices: list[Slice] = []
    if are_guesses:
        num_question_tokens = max(request.num_question_tokens for _, request in requests)
        budget = min(budget, max(_GUESSED_TOKENS, 2 * num_question_tokens))
    for request_id, request in requests:
        if request.num_to_load > 0 or request.num_rows_left < 0:
            continue
        if budget <= 0 or (slices and max_runs <= request.num_spare_runs):
            break
        num_rows = request.num_rows_left
        if num_rows > budget:
            if slices and budget < 2 * request.num_question_tokens:
                break  # for little more than the question once again: the next step has space
            num_rows = max(1, budget - request.num_question_tokens)
        num_rows, num_used = request.next_rows(num_rows, max(1, max_runs - request.num_spare_runs))
        slices.append(Slice(request_id, num_rows))
        budget = budget - num_rows if num_rows == request.num_rows_left else 0
        max_runs -= num_used + request.num_spare_runs
        request.num_rows_left -= num_rows
        if not request.num_rows_left:
            request.num_rows_left = -1
            for each in request.open.values():
                each.is_awaited = True
    return slices
