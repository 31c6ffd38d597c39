"""What of a step concerns vLLM's offloading: requests that begin or end, get blocks, or fill a chunk to be stored."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import copy
from typing import TYPE_CHECKING

from ragcache_core.vllm_plugin.offload.compat import (
    can_be_put_off,
    end_quiet_step,
    has_offloading_news,
    nothing_new,
    stores_from,
    with_late_stores,
)

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from ragcache_core.vllm_plugin.compat import OffloadingConnector, OffloadingConnectorMetadata


class StorePlanner:
    """Shows vLLM's offloading what concerns it of each step, and nothing of a step where nothing does.

    vLLM looks into each request of each step for 5 us, and most steps of an answer bring it nothing. Into the others it
    looks in the lull (:meth:`catch_up`) where that is soon enough: workers begin with what a step stores in the next.

    Args:
        offloading: the connector whose steps these are.
        look_into: has the offloading look into a step, and returns what workers have to copy.
    """

    def __init__(
        self, offloading: OffloadingConnector, look_into: Callable[[SchedulerOutput], OffloadingConnectorMetadata]
    ) -> None:
        self._offloading = offloading
        self._look_into = look_into
        self.has_lulls = False
        """Whether :meth:`catch_up` is called between a step and the next."""
        self._put_off: SchedulerOutput | None = None
        self._late: OffloadingConnectorMetadata | None = None
        self._stores_from: dict[str, float] = {}
        self._ends: dict[str, int] = {}
        """Up to which token the requests of the last step that was looked through were computed at its end."""
        self._num_tokens_left = 0.0
        """At least so many tokens from now each of these requests has to compute before it fills a chunk."""

    def __len__(self) -> int:
        """Return how many requests are known."""
        return len(self._stores_from)

    @property
    def is_behind(self) -> bool:
        """Whether a step was put off, or workers have not got what it stores."""
        return self._put_off is not None or self._late is not None

    def begin(self, output: SchedulerOutput) -> OffloadingConnectorMetadata:
        """Return what workers have to copy in a step, and of the step before."""
        shown = self.concerning(output)
        if shown is None:
            metadata = end_quiet_step(self._offloading)
        elif self.has_lulls and can_be_put_off(self._offloading, shown):
            self._put_off = shown
            metadata = nothing_new(self._offloading)
        else:
            metadata = self._look(shown)
        late, self._late = self._late, None
        return metadata if late is None else with_late_stores(metadata, late)

    def catch_up(self) -> None:
        """Have the offloading look into the step that was put off."""
        shown, self._put_off = self._put_off, None
        if shown is not None:
            # by now vLLM counts what the step computes among what its requests have
            shown.num_scheduled_tokens = dict.fromkeys(shown.num_scheduled_tokens, 0)
            metadata = self._look(shown)
            assert not metadata.load_jobs, "these begin in a step that is not put off"
            self._late = metadata if metadata.store_jobs or metadata.jobs_to_flush else None

    def concerning(self, output: SchedulerOutput) -> SchedulerOutput | None:
        """Return a step without the requests that neither fill a chunk in it nor get blocks; None for a quiet step."""
        if self._is_quiet(output):
            self._num_tokens_left -= 1
            return None
        cached, scheduled = output.scheduled_cached_reqs, output.num_scheduled_tokens
        storing: dict[str, int] = {}
        shown: list[int] = []
        self._ends = {new.req_id: new.num_computed_tokens + scheduled[new.req_id] for new in output.scheduled_new_reqs}
        columns = zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True)
        for i, (name, num_computed_tokens, block_ids) in enumerate(columns):
            self._ends[name] = end = num_computed_tokens + scheduled[name]
            # one that resumes may have less below the GPU than it had stored: vLLM then begins again from there
            if end >= self._stores_from.get(name, 0.0) or name in cached.resumed_req_ids:
                storing[name] = scheduled[name]
                shown.append(i)
            elif block_ids is not None:
                shown.append(i)
        storing.update((new.req_id, scheduled[new.req_id]) for new in output.scheduled_new_reqs)
        concerning, concerned = copy(output), copy(cached)  # dataclasses.replace() takes five times as long
        concerned.req_ids = [cached.req_ids[i] for i in shown]
        concerned.new_block_ids = [cached.new_block_ids[i] for i in shown]
        concerning.num_scheduled_tokens = storing
        concerning.scheduled_cached_reqs = concerned
        return concerning

    def _look(self, shown: SchedulerOutput) -> OffloadingConnectorMetadata:
        """Show vLLM a step, and take note of what it has to store next."""
        metadata = self._look_into(shown)
        for name in shown.num_scheduled_tokens:
            self._stores_from[name] = stores_from(self._offloading, name)
        for name in shown.finished_req_ids:
            self._stores_from.pop(name, None)
        left = (self._stores_from.get(name, 0.0) - end for name, end in self._ends.items())
        self._num_tokens_left = min(left, default=math.inf)
        return metadata

    def clear(self) -> None:
        """Forget what was noted: each request is looked into again."""
        self._stores_from.clear()
        self._ends.clear()
        self._num_tokens_left = 0.0

    def _is_quiet(self, output: SchedulerOutput) -> bool:
        """Return whether all that a step does is to compute one token each of answers that fill no chunk with it."""
        scheduled = output.num_scheduled_tokens
        return (
            self._num_tokens_left > 1
            and output.total_num_scheduled_tokens == len(scheduled)
            and not (output.scheduled_new_reqs or output.finished_req_ids or output.preempted_req_ids)
            and not any(output.scheduled_cached_reqs.new_block_ids)
            and scheduled.keys() <= self._ends.keys()
            and not has_offloading_news(self._offloading, output)
        )
