"""Shows vLLM's offloading only the requests that may have something to store in a step.

vLLM's offloading looks at every running request in every step. Most of them decode and store nothing: their prompt is
stored already, and their answer is not stored. This view costs O(changes) where that loop costs O(running requests).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ragcache_core.vllm_plugin.compat import CachedRequestData
from ragcache_core.vllm_plugin.offload.compat import fence_blocks, has_stored_all, requires_all_requests

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.v1.core.sched.output import SchedulerOutput

    from ragcache_core.vllm_plugin.compat import OffloadingConnector


class StoringRequests:
    """Tracks the running requests that are not stored as far as they may be.

    A request is shown when it gets blocks. A block is full before the next one is allocated, so each full block is
    offered one step late at most; the rest is offered when the request ends, which vLLM does from its own list.
    """

    def __init__(self, connector: OffloadingConnector) -> None:
        self._connector = connector
        self._storing: set[str] = set()
        self._shows_all = requires_all_requests(connector)

    def only_changes(self, output: SchedulerOutput) -> SchedulerOutput:
        """Return a step's output with the requests alone that may store something in it."""
        if self._shows_all:
            return output
        cached, storing = output.scheduled_cached_reqs, self._storing
        storing |= cached.resumed_req_ids
        storing.update(request.req_id for request in output.scheduled_new_reqs)
        storing.difference_update(output.finished_req_ids or ())
        shown: list[int] = []
        for index, groups in enumerate(cached.new_block_ids):
            if groups is None:
                continue
            if cached.req_ids[index] in storing:
                shown.append(index)
            else:  # a copy of what one of these blocks held before has to end first
                fence_blocks(self._connector, [block for group in groups for block in group if block])
        ids = [cached.req_ids[index] for index in shown]
        scheduled = output.num_scheduled_tokens
        new = [request.req_id for request in output.scheduled_new_reqs]
        return replace(
            output,
            scheduled_cached_reqs=CachedRequestData(
                req_ids=ids,
                resumed_req_ids=cached.resumed_req_ids,
                new_token_ids=[],
                all_token_ids={},
                new_block_ids=[cached.new_block_ids[index] for index in shown],
                num_computed_tokens=[],
                num_output_tokens=[],
            ),
            num_scheduled_tokens={name: scheduled[name] for name in (*new, *ids)},
        )

    def on_shown(self, output: SchedulerOutput) -> None:
        """Stop showing requests that have stored all they may; ``output`` is what :meth:`only_changes` returned."""
        if not self._shows_all:
            self._storing.difference_update(
                [name for name in output.num_scheduled_tokens if has_stored_all(self._connector, name)]
            )

    def on_reset(self, request_ids: Iterable[str]) -> None:
        """Show requests again whose stored KV was reset."""
        self._storing.update(request_ids)
