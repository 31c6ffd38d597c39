"""Observers of chunks in computation: they measure attention, and the chunks that a question attends to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ragcache_core.chunk.focus import FocusedChunks
from ragcache_core.vllm_plugin.chunks.compute.attention_mass import PromptKeys
from ragcache_core.vllm_plugin.chunks.compute.capture import ChunkCapture
from ragcache_core.vllm_plugin.chunks.compute.selective_prefill import InFlight, PartialPrefill
from ragcache_core.vllm_plugin.chunks.messages import Capture, CaptureStep, ChunkJob, FocusRequest, Slice
from ragcache_core.vllm_plugin.chunks.model.attention_layers import AttentionLayer
from ragcache_core.vllm_plugin.compat import get_forward_context, sum_over_workers


@dataclass(slots=True)
class Running:
    """A job whose slices have run or will run.

    ``positions`` and ``token_ids`` [num_rows] lie on the CPU, ``block_ids`` on the device.
    """

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
    def num_remaining(self) -> int:
        """Rows that are still to be computed."""
        return len(self.positions) - self.num_done


Slots = Callable[[Running, int], torch.Tensor]
"""Returns where the cache keeps a job's prompt, up to a position."""


class SeenInStep:
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
        self._rows: list[torch.Tensor] | None = None

    def observe(self, index: int, query: torch.Tensor) -> None:
        """See a layer's queries: those of all requests of the step."""
        if self._rows is None:
            # A token's slot is its own, so it says where in the batch a request begins, whatever its order.
            slot_mapping = get_forward_context().slot_mapping[self._layers[index].name]
            self._rows = [
                (slot_mapping == slots[step.start]).int().argmax()
                + torch.arange(step.end - step.start, device=query.device)
                for step, slots in self._steps
            ]
        for (step, slots), rows in zip(self._steps, self._rows, strict=True):
            self._capture.measure(index, step.captures, query[rows], torch.arange(step.start, step.end), slots)


@dataclass(slots=True)
class Looking:
    """A question that looks at chunks while its job's rows are computed."""

    number: int
    running: Running
    focus: FocusRequest
    chunks: FocusedChunks
    is_done: bool = False


class SeenInSlices:
    """Measures chunks that are computed in slices, and lets rows go that no question looks at."""

    def __init__(
        self,
        capture: ChunkCapture,
        layers: Sequence[AttentionLayer],
        slots: Slots,
        slices: Sequence[tuple[Running, Slice]],
        looking: Sequence[Looking],
    ) -> None:
        self._capture = capture
        self._layers = layers
        self._slots = slots
        self._slices = slices
        self._looking = looking
        self.flight: InFlight

    def watch(self, flight: InFlight) -> None:
        """Take the rows that are computed."""
        self.flight = flight

    def observe(self, index: int, query: torch.Tensor) -> None:
        """See a layer's queries: those of the rows in flight."""
        flight = self.flight
        for number, (running, _) in enumerate(self._slices):
            if not running.captures:
                continue
            mine = flight.rows_of(number)
            positions = flight.positions[mine]
            slots = self._slots(running, int(positions[-1]) + 1)
            self._capture.measure(index, running.captures, query[mine], positions, slots)
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

    def _look(self, looking: Looking, index: int, query: torch.Tensor) -> None:
        flight, running = self.flight, looking.running
        mine = flight.rows_of(looking.number)
        positions = flight.positions[mine]
        positions = positions[positions >= looking.focus.question_start]
        slots = self._slots(running, int(positions[-1]) + 1)
        keys = PromptKeys(self._layers[index], slots)
        mass = keys.mass(query[mine.stop - len(positions) : mine.stop], positions, looking.focus.chunks).sum(0)
        looking.chunks.observe(sum_over_workers(mass).tolist())
