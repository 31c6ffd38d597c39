"""vLLM's engine loop over a scheduler alone: two steps in flight, and a model and workers that do nothing."""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from typing import Any, Protocol

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request

from ragcache_core.vllm_plugin.offload.layer_loads import LayerLoadMetadata

_TOKEN = 7
_IDLE_S = 0.001


class Profiler(Protocol):
    """Records what is called between ``enable`` and ``disable``, as ``cProfile.Profile`` does."""

    def enable(self) -> None:
        """Begin to record."""
        ...

    def disable(self) -> None:
        """Stop recording."""
        ...


class EngineLoop:
    """Calls a scheduler as vLLM's ``step_with_batch_queue`` does, and sums up the processor time of its calls.

    The model answers each finished prompt with one token a step. A store ends with the next step, a load at once.

    Attributes:
        is_timed: whether calls are timed now.
        seconds: processor time of the scheduler's thread, by the name of the call.
        tokens: prompt tokens of the timed requests: ``prompt`` are all, ``gpu`` are hits on the GPU, and ``below`` are
            loaded.
        finished: ids of requests that have ended since this list was cleared.
    """

    def __init__(self, scheduler: Any, profiler: Profiler | None = None) -> None:
        self.scheduler = scheduler
        self.is_timed = False
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.tokens: Counter[str] = Counter()
        self.finished: list[str] = []
        self.requests: dict[str, Request] = {}
        self._profiler = profiler
        self._in_flight: deque[tuple[Any, ModelRunnerOutput]] = deque()
        self._stores: list[int] = []

    def add(self, request: Request) -> None:
        """Hand a new request to the scheduler."""
        self.requests[request.request_id] = request
        self._call("add_request", request)

    def step(self) -> None:
        """Schedule a step, and process the output of the step before it."""
        output = self._call("schedule")
        if output.total_num_scheduled_tokens:
            self._call("get_grammar_bitmask", output)
        self._in_flight.append((output, self._run(output)))
        if len(self._in_flight) > 1:
            self._process_output()

    def drain(self) -> None:
        """Step until no request, no copy and no write to a disk is left."""
        self.finish_requests()
        connector = self.scheduler.connector
        for _ in range(3):
            if connector is not None:
                self.step()
                self.finish_requests()
        while hasattr(connector, "tiers") and connector.tiers.has_pending_work():
            time.sleep(_IDLE_S)
            self.step()
            self.finish_requests()

    def finish_requests(self) -> None:
        """Step until no request is left; those that wait for a lower tier leave it some time between steps."""
        while self.scheduler.has_unfinished_requests():
            self.step()
            if not self._in_flight[-1][0].total_num_scheduled_tokens:
                time.sleep(_IDLE_S)
        while self._in_flight:
            self._process_output()

    def total_s(self) -> float:
        """Return the processor time of all timed calls in seconds."""
        return sum(self.seconds.values())

    def _call(self, name: str, *args: object) -> Any:
        function: Callable[..., Any] = getattr(self.scheduler, name)
        if not self.is_timed:
            return function(*args)
        if self._profiler is not None:
            self._profiler.enable()
        started = time.thread_time()
        result = function(*args)
        self.seconds[name] += time.thread_time() - started
        if self._profiler is not None:
            self._profiler.disable()
        return result

    def _process_output(self) -> None:
        outputs = self._call("update_from_output", *self._in_flight.popleft())
        for output in outputs.values():
            for answer in output.outputs:
                if self.is_timed and (prefill := answer.prefill_stats) is not None:
                    self.tokens["prompt"] += prefill.num_prompt_tokens
                    self.tokens["gpu"] += prefill.num_local_cached_tokens
                    self.tokens["below"] += prefill.num_external_cached_tokens
                if answer.finish_reason is not None:
                    self.finished.append(answer.request_id)
                    del self.requests[answer.request_id]

    def _run(self, output: Any) -> ModelRunnerOutput:
        ids = list(output.num_scheduled_tokens)
        requests = [self.requests.get(name) for name in ids]
        sampled = [[] if request is None or request.is_prefill_chunk else [_TOKEN] for request in requests]
        meta = output.kv_connector_metadata
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={name: index for index, name in enumerate(ids)},
            sampled_token_ids=sampled,
            kv_connector_output=self._copy(meta) if hasattr(meta, "store_jobs") else None,
        )

    def _copy(self, meta: Any) -> KVConnectorOutput:
        completed = [*self._stores, *meta.load_jobs]
        if isinstance(meta, LayerLoadMetadata):
            completed += [load.number for load in meta.layer_loads]
        flushed = [job for job in meta.store_jobs if job in (meta.jobs_to_flush or ())]
        self._stores = [job for job in meta.store_jobs if job not in flushed]
        worker = OffloadingWorkerMetadata()
        worker.completed_jobs = dict.fromkeys([*completed, *flushed], 1)
        loaded = {job.req_id for job in meta.load_jobs.values()}
        return KVConnectorOutput(finished_recving=loaded or None, kv_connector_worker_meta=worker)
