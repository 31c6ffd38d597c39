"""Compute scattered tokens of a prompt with vLLM's own layers (Cache-Craft §3.2.2, §4).

Each run of neighbouring tokens [a, b) is one sequence of the batch, with query length b - a, length b, and the block
table of its request::

    prompt      0 ......... a ======== b ............ c === d
    sequence 1  keys 0 .. b, queries a .. b           sequence 2  keys 0 .. d, queries c .. d

Attention that is causal from the bottom right is then exactly the mask by position, so stock kernels are exact, and
the model's own modules run, whatever they are: mixtures of experts, quantised weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ragcache_core.vllm_plugin.chunks.model.attention_layers import AttentionLayer
from ragcache_core.vllm_plugin.chunks.model.paged_kv import split_blocks, to_device
from ragcache_core.vllm_plugin.compat import CommonAttentionMetadata, get_forward_context, in_forward

if TYPE_CHECKING:
    from ragcache_core.vllm_plugin.chunks.compute.scattered_attention import ScatteredRows


_NO_BACKEND = object()
"""Metadata of layers whose attention no backend of vLLM computes; None would be a profiling run to it."""


@dataclass(slots=True)
class Rows:
    """Tokens of one request: ``positions``, sorted, and ``token_ids`` [num_rows]; its ``block_ids`` [num_blocks].

    Blocks lie on the device, positions and tokens on the CPU: rows are assigned to requests without a GPU read, which a
    step would have to wait for.
    """

    block_ids: torch.Tensor
    positions: torch.Tensor
    token_ids: torch.Tensor


Steer = Callable[[int], torch.Tensor | None]
"""Called before a layer with its index; returns which of the rows in flight go on, on the CPU, None for all."""


class LastKeysWritten(Exception):  # noqa: N818 (no error: what a pass is for is done)
    """Raised when the last layer's keys and values are in the cache, as the rest of the pass is not needed."""


class PartialPrefill:
    """Writes the KV of chosen tokens into the paged cache.

    Args:
        vllm_config: the engine's.
        model: the model as vLLM built it.
        groups: vLLM's ``AttentionGroup`` of the model.
        layers: the same layers, first one first.
        tokens_per_block: tokens in a block of vLLM's scheduler.
    """

    def __init__(
        self,
        vllm_config: Any,
        model: torch.nn.Module,
        groups: Sequence[Any],
        layers: Sequence[AttentionLayer],
        tokens_per_block: int,
    ) -> None:
        self._vllm_config = vllm_config
        self._model = model
        self._layers = layers
        self._tokens_per_block = tokens_per_block
        self.scattered: ScatteredRows | None = None
        """Computes the attention of short runs, unless None; called by the code that runs a prefill."""
        kv = {layer.name: layer.kv for layer in layers}
        # vLLM's own builders may keep buffers that the step around us still uses.
        self._builders = [
            (
                group.layer_names,
                tokens_per_block // kv[group.layer_names[0]].tokens_per_block,
                group.backend.get_builder_cls()(group.kv_cache_spec, group.layer_names, vllm_config, self.device),
            )
            for group in groups
        ]
        for _, _, builder in self._builders:
            if getattr(builder, "reorder_batch_threshold", None) is not None:
                builder.reorder_batch_threshold = 0  # a run of one token is no answer's: it need not come first

    @property
    def device(self) -> torch.device:
        """The device of the paged cache."""
        return self._layers[0].kv.cache.device

    def slots(self, block_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the slots in the paged cache of ``positions`` of a request with these blocks, on the device."""
        size = self._tokens_per_block
        return block_ids[positions // size].long() * size + positions % size

    def compute(
        self, rows: Sequence[Rows], steer: Steer | None = None, watch: Callable[[InFlight], None] | None = None
    ) -> None:
        """Compute ``rows`` (at least one) through all layers, which writes their KV into the cache.

        Args:
            rows: of one request each.
            steer: called before each layer; rows that it drops are not computed in this and later layers.
            watch: gets the rows in flight, which change as some are dropped.
        """
        flight = InFlight(rows, self.device)
        if watch is not None:
            watch(flight)
        metadata, slot_mapping = self._describe(flight)
        with (
            suppress(LastKeysWritten),
            torch.inference_mode(),
            in_forward(self._vllm_config, metadata, slot_mapping, flight.num_rows),
            self._steered(flight, steer),
        ):
            token_ids = torch.cat([each.token_ids for each in rows])
            self._model.forward(to_device(token_ids, self.device), flight.positions_there, None)

    def _describe(self, flight: InFlight) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Return the attention metadata and the slots of the rows in flight, by layer."""
        firsts, lasts = flight.runs()
        is_scattered = self.scattered is not None and self.scattered.is_better(flight.num_rows, len(firsts))
        flight.starts = to_device(flight.first_rows(), self.device) if is_scattered else None
        size, positions = self._tokens_per_block, flight.positions_there
        slots = flight.block_ids[to_device(flight.requests, self.device), positions // size].long()
        slots = slots * size + positions % size
        slot_mapping = {name: slots for names, _, _ in self._builders for name in names}
        if is_scattered:
            return dict.fromkeys(slot_mapping, _NO_BACKEND), slot_mapping
        starts = torch.cat((firsts, lasts[-1:] + 1)).to(torch.int32)
        ends = (flight.positions[lasts] + 1).to(torch.int32)
        table = flight.block_ids[to_device(flight.requests[firsts], self.device)]
        metadata: dict[str, Any] = {}
        for names, blocks_per_block, builder in self._builders:
            common = CommonAttentionMetadata(
                query_start_loc=to_device(starts, self.device),
                query_start_loc_cpu=starts,
                seq_lens=to_device(ends, self.device),
                num_reqs=len(table),
                num_actual_tokens=flight.num_rows,
                max_query_len=int((starts[1:] - starts[:-1]).max()),
                max_seq_len=int(ends.max()),
                block_table_tensor=split_blocks(table, blocks_per_block),
                slot_mapping=slots,
                causal=True,
                positions=positions,
                seq_lens_cpu_upper_bound=ends,
                is_prefilling=torch.ones(len(table), dtype=torch.bool),
            )
            # Fast: FlashAttention's schedule ahead of time holds no more sequences than requests may run.
            described = builder.build(0, common, fast_build=True)
            metadata.update(dict.fromkeys(names, described))
        return metadata, slot_mapping

    @contextmanager
    def _steered(self, flight: InFlight, steer: Steer | None) -> Iterator[None]:
        """Call ``steer`` before each layer; the model's own loop runs, with fewer rows if it says so."""
        if steer is None:
            yield
            return
        total = flight.num_rows

        def hook(index: int) -> Callable[..., Any]:
            def before(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
                num_before = flight.num_rows
                kept = steer(index)
                going_on = None
                if kept is not None and not bool(kept.all()):
                    going_on = to_device(kept.nonzero().flatten(), self.device)
                    flight.keep(kept, going_on)
                    context = get_forward_context()
                    context.attn_metadata, context.slot_mapping = self._describe(flight)
                if flight.num_rows == total:
                    return args, kwargs

                def cut(value: Any) -> Any:
                    if not isinstance(value, torch.Tensor) or not value.dim():
                        return value
                    if value.shape[0] == total:
                        return value[flight.index]
                    return value[going_on] if going_on is not None and value.shape[0] == num_before else value

                return tuple(map(cut, args)), {name: cut(value) for name, value in kwargs.items()}

            return before

        handles = [
            layer.decoder.register_forward_pre_hook(hook(index), with_kwargs=True)
            for index, layer in enumerate(self._layers)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class InFlight:
    """The rows in flight, with their requests and positions; some are dropped between layers.

    ``requests`` and ``positions`` [num_rows] lie on the CPU, sorted by request, then by position. On the device lie
    ``positions_there``, the same positions; ``index`` [num_rows], the rows' numbers at the start; and ``block_ids``
    [num_requests, num_blocks], padded with zeros. ``starts`` [num_requests + 1] are :meth:`first_rows` there, where the
    rows' attention is computed as that of scattered ones; else None.
    """

    def __init__(self, rows: Sequence[Rows], device: torch.device) -> None:
        self.block_ids = torch.nn.utils.rnn.pad_sequence([each.block_ids for each in rows], batch_first=True)
        self.positions = torch.cat([each.positions for each in rows])
        self.positions_there = to_device(self.positions, device)
        self.requests = torch.cat([torch.full_like(each.positions, number) for number, each in enumerate(rows)])
        self.index = torch.arange(len(self.positions), device=device)
        self.starts: torch.Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Number of rows still computed."""
        return len(self.positions)

    def rows_of(self, number: int) -> slice:
        """Return the rows of a request."""
        first, last = torch.searchsorted(self.requests, torch.tensor([number, number + 1])).tolist()
        return slice(first, last)

    def keep(self, kept: torch.Tensor, going_on: torch.Tensor) -> None:
        """Drop all rows except ``kept`` ``[num_rows]``, at least one.

        ``going_on`` are their numbers, on the device.
        """
        self.positions, self.requests = self.positions[kept], self.requests[kept]
        self.positions_there, self.index = self.positions_there[going_on], self.index[going_on]

    def first_rows(self) -> torch.Tensor:
        """Return the first row of each request, and the end of the last; ``[num_requests + 1]``."""
        num_rows = self.requests.bincount(minlength=len(self.block_ids))
        return torch.cat((num_rows.new_zeros(1), num_rows.cumsum(0)))

    def runs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the first and last row of each run of contiguous tokens of a request; ``[num_runs]`` each."""
        follows = (self.positions[1:] == self.positions[:-1] + 1) & (self.requests[1:] == self.requests[:-1])
        edges = (~follows).nonzero().flatten()
        firsts = torch.cat((edges.new_zeros(1), edges + 1))
        return firsts, torch.cat((edges, edges.new_full((1,), self.num_rows - 1)))
