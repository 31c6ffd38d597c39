"""The workers' side of chunk reuse: jobs that provide the tokens of requests, slice by slice, and captures.

All that happens here was decided in the step's metadata, so that every worker of a tensor-parallel model does the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ragcache_core.chunk.focus import FocusedChunks
from ragcache_core.chunk.preload import preload_depth
from ragcache_core.vllm_plugin.attention_layers import AttentionLayer
from ragcache_core.vllm_plugin.attention_mass import Observed, PromptKeys
from ragcache_core.vllm_plugin.chunk_capture import ChunkCapture, ChunkPages
from ragcache_core.vllm_plugin.chunk_injection import LayerwiseInjection, Placed, copy_rate
from ragcache_core.vllm_plugin.chunk_steps import (
    Capture,
    CaptureStep,
    ChunkJob,
    ChunkReport,
    ChunkStep,
    FocusRequest,
    Slice,
)
from ragcache_core.vllm_plugin.compat import get_forward_context, sum_over_workers
from ragcache_core.vllm_plugin.partial_prefill import InFlight, LastKeysWritten, PartialPrefill, Rows

_FOCUS_WINDOW = 3


@dataclass(slots=True)
class _Running:
    """A job of which slices have run or will; ``positions`` and ``token_ids`` [num_rows] lie on the device."""

    job: ChunkJob
    block_ids: torch.Tensor
    positions: torch.Tensor
    token_ids: torch.Tensor
    captures: tuple[Capture, ...]
    num_done: int = 0
    is_injected: bool = False
    is_cancelled: bool = False
    awaits_load: bool = False
    row_layers: int = 0

    @property
    def num_left(self) -> int:
        return len(self.positions) - self.num_done


class ChunkExecution:
    """Runs what a step's metadata asks for.

    Args:
        prefill: computes scattered tokens.
        layers: the model's.
        memory: where chunks are kept.
    """

    def __init__(self, prefill: PartialPrefill, layers: Sequence[AttentionLayer], memory: ChunkPages) -> None:
        self._prefill = prefill
        self._layers = layers
        self._memory = memory
        self._capture = ChunkCapture(layers, memory)
        self._observed = Observed(layers)
        self._running: dict[str, _Running] = {}
        self._finished: dict[str, torch.cuda.Event | None] = {}
        self._report = ChunkReport()
        self._step = ChunkStep()
        is_cuda = prefill.device.type == "cuda"
        self._stream = torch.cuda.Stream() if is_cuda else None
        self._copy_rate = copy_rate(prefill.device) if is_cuda else float("inf")
        layers[0].unrotated.warm_up()

    def close(self) -> None:
        """Leave the model as it was."""
        self._observed.close()
        self._running.clear()

    def begin(self, step: ChunkStep) -> None:
        """Take a step's work, before its forward pass."""
        self._step = step
        for request_id in step.cancelled:
            if (running := self._running.get(request_id)) is not None:
                running.is_cancelled = True
                self._end_if_cancelled(request_id, running)
        for request_id in step.forgotten:
            if (running := self._running.get(request_id)) is not None:
                running.captures = ()
        self._capture.forget((*step.forgotten, *step.cancelled))
        for job in step.jobs:
            self._running[job.request_id] = _Running(
                job,
                self._tensor(job.block_ids),
                self._tensor(job.positions),
                self._tensor(job.token_ids),
                job.captures,
                awaits_load=job.awaits_load,
            )
        if step.captures:
            seen = _SeenInStep(self._capture, self._layers, self._prefill, step.captures, self._tensor)
            self._observed.observer = seen.observe

    def on_loaded(self, request_id: str) -> bool:
        """Take note that the tiers below have brought a request's exact tokens; False if it has no job here.

        Until then its blocks are written to, so that a cancelled job does not end before.
        """
        running = self._running.get(request_id)
        if running is None:
            return False
        running.awaits_load = False
        self._report.num_loaded[request_id] += 1
        self._end_if_cancelled(request_id, running)
        return True

    def run_slices(self) -> None:
        """Run the step's slices, as one batch."""
        slices = [
            (self._running[part.request_id], part) for part in self._step.slices if part.request_id in self._running
        ]
        if slices:
            with torch.inference_mode():
                self._run(slices)
        self._step.slices = []

    def end(self) -> None:
        """Keep the chunks that vLLM has completed in this step."""
        self._observed.observer = None
        with torch.inference_mode():
            for step in self._step.captures:
                self._keep((each for each in step.captures if each.end <= step.end), self._tensor(step.block_ids))
        self._step.captures = []

    def take_finished(self) -> set[str]:
        """Return the requests whose jobs ended since the last call: on CUDA, whose copies out of the memory have."""
        finished = {name for name, event in self._finished.items() if event is None or event.query()}
        for name in finished:
            del self._finished[name]
        return finished

    def take_report(self) -> ChunkReport:
        """Return what was done since the last call."""
        report, self._report = self._report, ChunkReport()
        return report

    def _end_if_cancelled(self, request_id: str, running: _Running) -> None:
        if running.is_cancelled and not running.awaits_load:
            del self._running[request_id]
            self._finished[request_id] = self._mark()

    # Slices

    def _run(self, slices: Sequence[tuple[_Running, Slice]]) -> None:
        fresh = [running for running, _ in slices if not running.is_injected]
        placed = [
            Placed(each, self._slots(running, each.first, each.last))
            for running in fresh
            for each in running.job.injections
        ]
        injection = LayerwiseInjection(
            self._layers, self._memory, placed, depth=self._depth(fresh, placed), stream=self._stream
        )
        for running in fresh:
            running.is_injected = True
        computed = [(running, part) for running, part in slices if part.num_rows]
        if computed:
            self._compute(computed, injection)
        else:
            injection.inject_all()
        for running, _ in slices:
            if not running.num_left:
                self._finish(running)

    def _depth(self, fresh: Sequence[_Running], placed: Sequence[Placed]) -> int:
        """Return how many layers to load ahead of the one that is computed (Cache-Craft Eq. 16)."""
        kv = self._layers[0].kv
        token_bytes = 2 * kv.num_kv_heads * kv.head_dim * kv.cache.itemsize * len(self._layers)
        num_bytes = token_bytes * sum(len(each.slots) for each in placed)
        prefill_s = sum(running.job.prefill_s for running in fresh)
        return preload_depth(len(self._layers), prefill_s=prefill_s, load_s=num_bytes / self._copy_rate)

    def _compute(self, slices: Sequence[tuple[_Running, Slice]], injection: LayerwiseInjection) -> None:
        rows, looking = [], []
        for number, (running, part) in enumerate(slices):
            first, last = running.num_done, running.num_done + part.num_rows
            running.num_done = last
            chosen = torch.arange(first, last, device=running.positions.device)
            focus = running.job.focus
            if focus is not None:
                questions = (running.positions >= focus.question_start).nonzero().flatten()
                chosen = torch.cat((chosen, questions[questions >= last]))  # they look, in every slice
                chunks = FocusedChunks(len(focus.chunks), window=_FOCUS_WINDOW)
                looking.append(_Looking(number, running, focus, chunks))
            rows.append(Rows(running.block_ids, running.positions[chosen], running.token_ids[chosen]))
        seen = _SeenInSlices(self, slices, looking)

        num_rows = [len(each.positions) for each in rows]

        def steer(index: int) -> torch.Tensor | None:
            nonlocal num_rows
            injection.inject(index)
            kept = seen.still_needed()
            if kept is not None:
                num_rows = seen.flight.requests[kept].bincount(minlength=len(slices)).tolist()
            for (running, _), count in zip(slices, num_rows, strict=True):
                running.row_layers += count
            return kept

        def observe(index: int, query: torch.Tensor) -> None:
            seen.observe(index, query)
            if index == len(self._layers) - 1:
                raise LastKeysWritten

        around, self._observed.observer = self._observed.observer, observe
        try:
            self._prefill.compute(rows, steer, seen.watch)
        finally:
            self._observed.observer = around

    def _finish(self, running: _Running) -> None:
        job = running.job
        self._keep(running.captures, running.block_ids)
        self._report.computed_rows[job.request_id] = running.row_layers / len(self._layers)
        del self._running[job.request_id]
        self._finished[job.request_id] = self._mark()

    def _mark(self) -> torch.cuda.Event | None:
        """Return what says that everything queued so far has been done; None where nothing is queued."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def _keep(self, captures: Iterable[Capture], block_ids: torch.Tensor) -> None:
        for capture in captures:
            slots = self._prefill.slots(block_ids, torch.arange(capture.end, device=block_ids.device))
            kept = self._capture.keep(capture, slots)
            self._report.num_captured[capture.id] += 1
            if kept is not None:
                self._report.captured[capture.id] = kept

    def _slots(self, running: _Running, first: int, last: int) -> torch.Tensor:
        return self._prefill.slots(running.block_ids, torch.arange(first, last, device=running.block_ids.device))

    def _tensor(self, values: Any) -> torch.Tensor:
        return torch.as_tensor(values).to(self._prefill.device, non_blocking=True)


class _SeenInStep:
    """Measures chunks while vLLM computes them in a step of its own."""

    def __init__(
        self,
        capture: ChunkCapture,
        layers: Sequence[AttentionLayer],
        prefill: PartialPrefill,
        steps: Sequence[CaptureStep],
        tensor: Any,
    ) -> None:
        self._capture = capture
        self._layers = layers
        self._steps = [
            (step, prefill.slots(tensor(step.block_ids), torch.arange(step.end, device=prefill.device)))
            for step in steps
        ]
        self._first_rows: list[int] | None = None

    def observe(self, index: int, query: torch.Tensor) -> None:
        """See a layer's queries: those of all requests of the step."""
        if self._first_rows is None:
            # A token's slot is its own, so it says where in the batch a request begins, whatever its order.
            slot_mapping = get_forward_context().slot_mapping[self._layers[index].name]
            self._first_rows = [int((slot_mapping == slots[step.start]).nonzero()[0]) for step, slots in self._steps]
        for (step, slots), first in zip(self._steps, self._first_rows, strict=True):
            rows = query[first : first + step.end - step.start]
            positions = torch.arange(step.start, step.end, device=query.device)
            self._capture.measure(index, step.captures, rows, positions, slots)


@dataclass(slots=True)
class _Looking:
    """A question that looks at chunks while its job's rows are computed."""

    number: int
    running: _Running
    focus: FocusRequest
    chunks: FocusedChunks
    is_done: bool = False


class _SeenInSlices:
    """Measures chunks that are computed in slices, and lets rows go that no question looks at."""

    def __init__(
        self, execution: ChunkExecution, slices: Sequence[tuple[_Running, Slice]], looking: Sequence[_Looking]
    ) -> None:
        self._execution = execution
        self._slices = slices
        self._looking = looking
        self.flight: InFlight

    def watch(self, flight: InFlight) -> None:
        """Take the rows that are computed."""
        self.flight = flight

    def observe(self, index: int, query: torch.Tensor) -> None:
        """See a layer's queries: those of the rows in flight."""
        execution, flight = self._execution, self.flight
        for number, (running, _) in enumerate(self._slices):
            if not running.captures:
                continue
            mine = flight.requests == number
            positions = flight.positions[mine]
            slots = execution._slots(running, 0, int(positions[-1]) + 1)
            execution._capture.measure(index, running.captures, query[mine], positions, slots)
        for looking in self._looking:
            if not looking.is_done:
                self._look(looking, index, query)

    def still_needed(self) -> torch.Tensor | None:
        """Return which rows to go on with: without those of chunks that a question has turned away from."""
        kept = None
        for looking in self._looking:
            if looking.is_done or not looking.chunks.is_settled:
                continue
            looking.is_done = True
            flight, focus = self.flight, looking.focus
            kept = torch.ones_like(flight.requests, dtype=torch.bool) if kept is None else kept
            for chunk in set(focus.droppable) - looking.chunks.focused:
                start, end = focus.chunks[chunk]
                inside = (flight.positions >= start) & (flight.positions < end)
                kept &= ~(inside & (flight.requests == looking.number))
        return kept

    def _look(self, looking: _Looking, index: int, query: torch.Tensor) -> None:
        flight, running = self.flight, looking.running
        asking = (flight.requests == looking.number) & (flight.positions >= looking.focus.question_start)
        positions = flight.positions[asking]
        slots = self._execution._slots(running, 0, int(positions[-1]) + 1)
        keys = PromptKeys(self._execution._layers[index], slots)
        mass = keys.mass(query[asking], positions, looking.focus.chunks).sum(0)
        looking.chunks.observe(sum_over_workers(mass).tolist())
