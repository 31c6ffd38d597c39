"""T(cached, new): what a prefill costs in a model of Llama-3-8B's shape with random weights, by PyTorch alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - as everywhere
from torch.nn.attention.bias import causal_lower_right

from benchmarks.kernels.timing import Stopwatch, Timing

CACHED_TOKENS = (0, 1024, 4096, 16384, 32768)
NEW_TOKENS = (1, 16, 64, 256, 1024, 4096, 8192)


@dataclass(frozen=True, slots=True)
class Sizes:
    """A Llama's sizes; its head is computed for the last token alone."""

    hidden: int = 4096
    num_layers: int = 32
    num_heads: int = 32
    num_kv_heads: int = 8
    intermediate: int = 14336
    vocabulary: int = 128256
    dtype: torch.dtype = torch.bfloat16

    @property
    def head_dim(self) -> int:
        """Of each head."""
        return self.hidden // self.num_heads

    @property
    def kv_bytes_per_token(self) -> int:
        """Of all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def layer_bytes(self) -> int:
        """Weights of one layer."""
        attention = self.hidden * (2 * self.hidden + 2 * self.num_kv_heads * self.head_dim)
        return (attention + 3 * self.hidden * self.intermediate) * self.dtype.itemsize


class RandomLlama:
    """A Llama without meaning that takes as long as one with: random weights, random KV for ``num_positions`` tokens.

    ``num_distinct_layers``: how many layers have weights of their own; the others share them, which changes what is
    computed and not how long it takes, as no layer fits into a cache.
    """

    def __init__(self, sizes: Sizes, num_positions: int, device: torch.device, num_distinct_layers: int) -> None:
        self.sizes = sizes
        generator = torch.Generator(device).manual_seed(0)

        def weight(rows: int, columns: int) -> torch.Tensor:
            made = torch.empty(rows, columns, dtype=sizes.dtype, device=device)
            return made.normal_(std=columns**-0.5, generator=generator)

        kv_width = sizes.num_kv_heads * sizes.head_dim
        self._layers = [
            (
                weight(sizes.hidden + 2 * kv_width, sizes.hidden),
                weight(sizes.hidden, sizes.hidden),
                weight(2 * sizes.intermediate, sizes.hidden),
                weight(sizes.hidden, sizes.intermediate),
            )
            for _ in range(num_distinct_layers)
        ]
        self._head = weight(sizes.vocabulary, sizes.hidden)
        self._norm = torch.ones(sizes.hidden, dtype=sizes.dtype, device=device)
        cache = (sizes.num_layers, 2, sizes.num_kv_heads, num_positions, sizes.head_dim)
        self.cache = torch.empty(cache, dtype=sizes.dtype, device=device).normal_(generator=generator)
        frequencies = 500_000.0 ** (-torch.arange(0, sizes.head_dim, 2, device=device) / sizes.head_dim)
        angles = torch.arange(num_positions, device=device)[:, None] * frequencies.repeat(2)
        self._cos, self._sin = angles.cos().to(sizes.dtype), angles.sin().to(sizes.dtype)

    def forward(self, embedded: torch.Tensor, num_cached: int) -> torch.Tensor:
        """Return the logits behind the last of ``embedded`` [num_new, hidden], which follow ``num_cached`` tokens."""
        sizes, num_new = self.sizes, embedded.shape[0]
        end = num_cached + num_new
        cos, sin = self._cos[num_cached:end], self._sin[num_cached:end]
        hidden = embedded
        for number in range(sizes.num_layers):
            qkv, output, gate_up, down = self._layers[number % len(self._layers)]
            projected = F.linear(self._normed(hidden), qkv).view(num_new, -1, sizes.head_dim).transpose(0, 1)
            query, key, value = projected.split((sizes.num_heads, sizes.num_kv_heads, sizes.num_kv_heads))
            keys, values = self.cache[number, :, :, :end]
            keys[:, num_cached:] = _rotated(key, cos, sin)
            values[:, num_cached:] = value
            attended = _attention(_rotated(query, cos, sin), keys, values).transpose(0, 1).reshape(num_new, -1)
            hidden = hidden + F.linear(attended, output)
            gate, up = F.linear(self._normed(hidden), gate_up).chunk(2, -1)
            hidden = hidden + F.linear(F.silu(gate) * up, down)
        return F.linear(self._normed(hidden[-1:]), self._head)

    def _normed(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden, (self.sizes.hidden,), self._norm, 1e-5)


@dataclass(frozen=True, slots=True)
class PrefillProfile:
    """Times by (cached, new) tokens."""

    cached_tokens: tuple[int, ...]
    new_tokens: tuple[int, ...]
    timings: dict[tuple[int, int], Timing]
    num_distinct_layers: int

    @property
    def seconds(self) -> list[list[float]]:
        """A row for each cached length, in it a time for each new one."""
        return [[self.timings[cached, new].median_s for new in self.new_tokens] for cached in self.cached_tokens]

    @property
    def spread(self) -> float:
        """The median of the points' spreads."""
        spreads = sorted(timing.spread for timing in self.timings.values())
        return spreads[len(spreads) // 2]


def measure_prefill(
    stopwatch: Stopwatch,
    sizes: Sizes,
    cached_tokens: tuple[int, ...] = CACHED_TOKENS,
    new_tokens: tuple[int, ...] = NEW_TOKENS,
    *,
    progress: Callable[[list[tuple[int, int]]], Iterator[tuple[int, int]]] = iter,
) -> PrefillProfile:
    """Return what prefills of these lengths take, without the longest cached ones where memory is short.

    Raises:
        MemoryError: not even two cached lengths fit.
    """
    cached_tokens, num_distinct = _fitting(sizes, cached_tokens, new_tokens, _free_bytes(stopwatch.device))
    model = RandomLlama(sizes, cached_tokens[-1] + new_tokens[-1], stopwatch.device, num_distinct)
    timings = {}
    for cached, new in progress([(cached, new) for cached in cached_tokens for new in new_tokens]):
        embedded = torch.randn(new, sizes.hidden, device=stopwatch.device).to(sizes.dtype)
        timings[cached, new] = stopwatch.time(lambda: model.forward(embedded, cached))  # noqa: B023 - called at once
    return PrefillProfile(cached_tokens, new_tokens, timings, num_distinct)


def continues_exactly(device: torch.device) -> float:
    """Return how far a small model's logits behind a cached prefix are from those of the whole prompt at once."""
    sizes = Sizes(256, 3, 8, 2, 512, 300, torch.bfloat16 if device.type == "cuda" else torch.float32)
    model = RandomLlama(sizes, 97, device, sizes.num_layers)
    prompt = torch.randn(97, sizes.hidden, device=device).to(sizes.dtype)
    whole = model.forward(prompt, 0).float()
    errors = []
    for num_cached in (40, 96):
        model.forward(prompt[:num_cached], 0)
        errors.append(float((model.forward(prompt[num_cached:], num_cached).float() - whole).abs().max()))
    return max(errors) / float(whole.abs().max())


def _attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    # query [num_heads, new, head_dim], keys [num_kv_heads, cached + new, head_dim]: causal, aligned at the end.
    num_new, num_keys = query.shape[1], keys.shape[1]
    mask = None if num_new in (1, num_keys) else causal_lower_right(num_new, num_keys)
    is_causal = num_new == num_keys and num_new > 1
    attended: torch.Tensor = F.scaled_dot_product_attention(
        query[None], keys[None], values[None], attn_mask=mask, is_causal=is_causal, enable_gqa=True
    )
    return attended[0]


def _rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = heads.chunk(2, -1)
    return (heads * cos).addcmul_(torch.cat((-second, first), -1), sin)


def _free_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 1 << 40
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def _fitting(
    sizes: Sizes, cached_tokens: tuple[int, ...], new_tokens: tuple[int, ...], free_bytes: int
) -> tuple[tuple[int, ...], int]:
    # Beside weights and KV: the head, what a layer computes for the longest prompt, called and captured in a graph, and
    # a tenth to spare.
    room = int(0.9 * free_bytes) - sizes.vocabulary * sizes.hidden * sizes.dtype.itemsize
    room -= 16 * new_tokens[-1] * sizes.intermediate * sizes.dtype.itemsize
    for end in range(len(cached_tokens), 1, -1):
        left = room - (cached_tokens[end - 1] + new_tokens[-1]) * sizes.kv_bytes_per_token
        if left >= sizes.layer_bytes:
            return cached_tokens[:end], min(sizes.num_layers, left // sizes.layer_bytes)
    raise MemoryError(
        f"{free_bytes / 2**30:.1f} GiB are free, the prefill profile needs more for {cached_tokens[1]:,} cached and "
        f"{new_tokens[-1]:,} new tokens: leave it out with --skip-prefill"
    )
