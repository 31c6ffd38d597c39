"""Computes scattered tokens of a prompt with vLLM's own layers (Cache-Craft §3.2.2, §4).

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
from ragcache_core.vllm_plugin.chunks.model.paged_kv import split_blocks
from ragcache_core.vllm_plugin.compat import CommonAttentionMetadata, get_forward_context, in_forward

if TYPE_CHECKING:
    from ragcache_core.vllm_plugin.chunks.compute.scattered_attention import ScatteredRows


_NO_BACKEND = object()
"""Metadata of layers whose attention no backend of vLLM computes; None would be a profiling run to it."""


@dataclass(slots=True)
class Rows:
    """Tokens of one request: ``positions``, sorted, and ``token_ids`` [num_rows]; its ``block_ids`` [num_blocks]."""

    block_ids: torch.Tensor
    positions: torch.Tensor
    token_ids: torch.Tensor


Steer = Callable[[int], torch.Tensor | None]
"""Called before a layer with its index; returns which of the rows in flight go on, None for all."""


class LastKeysWritten(Exception):  # noqa: N818 (no error: what a pass is for is done)
    """Raised by whoever sees the last layer's keys and values in the cache: the rest of the pass is not needed."""


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
        """Computes the attention of short runs, if anything does; whoever runs a prefill then asks it for that."""
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
        """Where the paged cache lies."""
        return self._layers[0].kv.cache.device

    def slots(self, block_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return where the paged cache keeps ``positions`` of a request with these blocks."""
        size = self._tokens_per_block
        return block_ids[positions // size].long() * size + positions % size

    def compute(
        self, rows: Sequence[Rows], steer: Steer | None = None, watch: Callable[[InFlight], None] | None = None
    ) -> None:
        """Compute ``rows``, of which there is at least one, through all layers; their KV is in the cache then.

        Args:
            rows: of one request each.
            steer: asked before each layer; what it lets go is not computed in it and in those after.
            watch: gets the rows in flight, which change as some leave.
        """
        flight = InFlight(rows)
        if watch is not None:
            watch(flight)
        metadata, slot_mapping = self._describe(flight)
        with (
            suppress(LastKeysWritten),
            torch.inference_mode(),
            in_forward(self._vllm_config, metadata, slot_mapping, flight.num_rows),
            self._steered(flight, steer),
        ):
            self._model.forward(flight.token_ids, flight.positions, None)

    def _describe(self, flight: InFlight) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Return the attention metadata and the slots of the rows in flight, by layer."""
        firsts, lasts = flight.runs()
        is_scattered = self.scattered is not None and self.scattered.is_better(flight.num_rows, len(firsts))
        flight.starts = flight.first_rows() if is_scattered else None
        size = self._tokens_per_block
        blocks = flight.block_ids[flight.requests, flight.positions // size].long()
        slots = blocks * size + flight.positions % size
        slot_mapping = {name: slots for names, _, _ in self._builders for name in names}
        if is_scattered:
            return dict.fromkeys(slot_mapping, _NO_BACKEND), slot_mapping
        starts = torch.cat((firsts, lasts[-1:] + 1)).to(torch.int32)
        starts_cpu = starts.cpu()
        ends = (flight.positions[lasts] + 1).to(torch.int32)
        ends_cpu = ends.cpu()
        table = flight.block_ids[flight.requests[firsts]]
        metadata: dict[str, Any] = {}
        for names, blocks_per_block, builder in self._builders:
            common = CommonAttentionMetadata(
                query_start_loc=starts,
                query_start_loc_cpu=starts_cpu,
                seq_lens=ends,
                num_reqs=len(table),
                num_actual_tokens=flight.num_rows,
                max_query_len=int((starts_cpu[1:] - starts_cpu[:-1]).max()),
                max_seq_len=int(ends_cpu.max()),
                block_table_tensor=split_blocks(table, blocks_per_block),
                slot_mapping=slots,
                causal=True,
                positions=flight.positions,
                seq_lens_cpu_upper_bound=ends_cpu,
                is_prefilling=torch.ones(len(table), dtype=torch.bool),
            )
            # Fast: FlashAttention's schedule ahead of time holds no more sequences than requests may run.
            described = builder.build(0, common, fast_build=True)
            metadata.update(dict.fromkeys(names, described))
        return metadata, slot_mapping

    @contextmanager
    def _steered(self, flight: InFlight, steer: Steer | None) -> Iterator[None]:
        """Let ``steer`` be asked before each layer: the model's own loop runs, with fewer rows where it says so."""
        if steer is None:
            yield
            return
        total = flight.num_rows

        def hook(index: int) -> Callable[..., Any]:
            def before(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
                num_before = flight.num_rows
                kept = steer(index)
                if kept is not None and not bool(kept.all()):
                    flight.keep(kept)
                    context = get_forward_context()
                    context.attn_metadata, context.slot_mapping = self._describe(flight)
                if flight.num_rows == total:
                    return args, kwargs

                def cut(value: Any) -> Any:
                    if not isinstance(value, torch.Tensor) or not value.dim():
                        return value
                    if value.shape[0] == total:
                        return value[flight.index]
                    return value[kept] if kept is not None and value.shape[0] == num_before else value

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
    """The rows that are being computed: which of which request, at which position; some leave on the way.

    ``requests``, ``positions``, ``token_ids`` and ``index`` are [num_rows]; ``index`` says which of the rows at the
    start they are. ``block_ids`` [num_requests, num_blocks] are padded with zeros. ``starts`` [num_requests + 1] are
    :meth:`first_rows` where the rows' attention is computed as that of scattered ones, None elsewhere.
    """

    def __init__(self, rows: Sequence[Rows]) -> None:
        self.block_ids = torch.nn.utils.rnn.pad_sequence([each.block_ids for each in rows], batch_first=True)
        self.positions = torch.cat([each.positions for each in rows])
        self.token_ids = torch.cat([each.token_ids for each in rows])
        self.requests = torch.cat([torch.full_like(each.positions, number) for number, each in enumerate(rows)])
        self.index = torch.arange(len(self.positions), device=self.positions.device)
        self.starts: torch.Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Rows that are still computed."""
        return len(self.positions)

    def keep(self, kept: torch.Tensor) -> None:
        """Let go of all rows but ``kept`` [num_rows], of which there is at least one."""
        self.positions, self.token_ids = self.positions[kept], self.token_ids[kept]
        self.requests, self.index = self.requests[kept], self.index[kept]

    def first_rows(self) -> torch.Tensor:
        """Return where each request's rows begin, and where the last one's end; [num_requests + 1]."""
        num_rows = self.requests.bincount(minlength=len(self.block_ids))
        return torch.cat((num_rows.new_zeros(1), num_rows.cumsum(0)))

    def runs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the first and the last row of each run of neighbouring tokens of a request; [num_runs] each."""
        follows = (self.positions[1:] == self.positions[:-1] + 1) & (self.requests[1:] == self.requests[:-1])
        edges = (~follows).nonzero().flatten()
        firsts = torch.cat((edges.new_zeros(1), edges + 1))
        return firsts, torch.cat((edges, edges.new_full((1,), self.num_rows - 1)))
