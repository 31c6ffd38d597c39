"""The workers' side of chunk reuse: jobs that provide the tokens of requests, slice by slice, and captures.

The step's metadata decides everything here, so every worker of a tensor-parallel model does the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ragcache_core.chunk.focus import FocusedChunks
from ragcache_core.chunk.preload import preload_depth
from ragcache_core.vllm_plugin.chunks.compute.attention_mass import Observed
from ragcache_core.vllm_plugin.chunks.compute.attention_probe import Looking, Running, SeenInSlices, SeenInStep
from ragcache_core.vllm_plugin.chunks.compute.capture import ChunkCapture, ChunkPages, figures_of
from ragcache_core.vllm_plugin.chunks.compute.loader import LayerwiseLoader, Placed, copy_rate
from ragcache_core.vllm_plugin.chunks.compute.selective_prefill import LastKeysWritten, PartialPrefill, Rows
from ragcache_core.vllm_plugin.chunks.messages import Capture, ChunkReport, ChunkStep, Slice
from ragcache_core.vllm_plugin.chunks.model.attention_layers import AttentionLayer
from ragcache_core.vllm_plugin.chunks.model.paged_kv import to_device


class ChunkExecutor:
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
        self._running: dict[str, Running] = {}
        self._finished: dict[str, torch.cuda.Event | None] = {}
        self._kept: list[tuple[Capture, torch.Tensor]] = []
        self._report = ChunkReport()
        self._step = ChunkStep()
        is_cuda = prefill.device.type == "cuda"
        self._stream = torch.cuda.Stream() if is_cuda else None
        self._copy_rate = copy_rate(prefill.device) if is_cuda else float("inf")

    @property
    def computes_scattered(self) -> bool:
        """Whether tokens that stand anywhere cost no more than neighbours do."""
        return self._prefill.scattered is not None

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
        self._report.fence = step.fence or self._report.fence
        for job in step.jobs:
            self._running[job.request_id] = Running(
                job,
                self._tensor(job.block_ids),
                torch.as_tensor(job.positions),
                torch.as_tensor(job.token_ids),
                job.captures,
                awaits_load=job.awaits_load,
            )
        if step.captures:
            seen = SeenInStep(self._capture, self._layers, self._prefill, step.captures, self._tensor)
            self._observed.observer = seen.observe

    def on_loaded(self, request_id: str) -> bool:
        """Record that lower tiers have loaded a request's exact tokens; False if it has no job here.

        The load writes to its blocks, so a cancelled job does not end before.
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
        """Return the requests whose jobs, on CUDA with their copies out of the memory, ended since the last call."""
        finished = {name for name, event in self._finished.items() if event is None or event.query()}
        for name in finished:
            del self._finished[name]
        return finished

    def take_report(self) -> ChunkReport:
        """Return what was done since the last call, when the chunks that were kept lie in their pages."""
        if self._kept and self._stream is not None:
            torch.cuda.current_stream().synchronize()
        self._report.captured.update((capture.id, figures_of(capture, mass)) for capture, mass in self._kept)
        self._kept.clear()
        report, self._report = self._report, ChunkReport()
        return report

    def _end_if_cancelled(self, request_id: str, running: Running) -> None:
        if running.is_cancelled and not running.awaits_load:
            del self._running[request_id]
            self._finished[request_id] = self._mark()

    # Slices

    def _run(self, slices: Sequence[tuple[Running, Slice]]) -> None:
        fresh = [running for running, _ in slices if not running.is_injected]
        placed = [
            Placed(each, self._slots(running, each.first, each.last))
            for running in fresh
            for each in running.job.injections
        ]
        injection = LayerwiseLoader(
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
            if not running.num_remaining:
                self._finish(running)

    def _depth(self, fresh: Sequence[Running], placed: Sequence[Placed]) -> int:
        """Return how many layers to load ahead of the one that is computed (Cache-Craft Eq. 16)."""
        kv = self._layers[0].kv
        token_bytes = 2 * kv.num_kv_heads * kv.head_dim * kv.cache.itemsize * len(self._layers)
        num_bytes = token_bytes * sum(len(each.slots) for each in placed)
        prefill_s = sum(running.job.prefill_s for running in fresh)
        return preload_depth(len(self._layers), prefill_s=prefill_s, load_s=num_bytes / self._copy_rate)

    def _compute(self, slices: Sequence[tuple[Running, Slice]], injection: LayerwiseLoader) -> None:
        rows, looking = [], []
        for number, (running, part) in enumerate(slices):
            first, last = running.num_done, running.num_done + part.num_rows
            running.num_done = last
            chosen = torch.arange(first, last)
            focus = running.job.focus
            if focus is not None:
                questions = (running.positions >= focus.question_start).nonzero().flatten()
                chosen = torch.cat((chosen, questions[questions >= last]))  # they look, in every slice
                chunks = FocusedChunks(len(focus.chunks), window=focus.window)
                looking.append(Looking(number, running, focus, chunks))
            rows.append(Rows(running.block_ids, running.positions[chosen], running.token_ids[chosen]))
        seen = SeenInSlices(self._capture, self._layers, lambda job, end: self._slots(job, 0, end), slices, looking)

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

        def attend(index: int, query: torch.Tensor, output: torch.Tensor) -> bool:
            scattered = self._prefill.scattered
            if scattered is None or seen.flight.starts is None:
                return False
            scattered.attend(index, query, output, seen.flight)
            return True

        around, self._observed.observer = self._observed.observer, observe
        self._observed.attend = attend
        try:
            self._prefill.compute(rows, steer, seen.watch)
        finally:
            self._observed.observer, self._observed.attend = around, None

    def _finish(self, running: Running) -> None:
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
            mass = self._capture.keep(capture, slots)
            self._report.num_captured[capture.id] += 1
            if mass is not None:
                self._kept.append((capture, mass))

    def _slots(self, running: Running, first: int, last: int) -> torch.Tensor:
        return self._prefill.slots(running.block_ids, torch.arange(first, last, device=running.block_ids.device))

    def _tensor(self, values: Any) -> torch.Tensor:
        return to_device(torch.as_tensor(values), self._prefill.device)
