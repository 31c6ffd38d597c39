"""Chunks as they are captured: their statistics measured on random attention by the paper's sums, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from ragcache_core.chunk import ChunkKey, ChunkSpan, ChunkStatistics, ChunkVariant, ContextKey, chunk_key
from ragcache_core.chunk.types import context_behind

NUM_LAYERS, NUM_HEADS = 2, 3


@dataclass(frozen=True)
class Prompt:
    """A static prefix, chunks, and attention behind them: [layers, heads, tokens, tokens], causal, rows add up to 1."""

    spans: tuple[ChunkSpan, ...]
    attention: NDArray[np.float64]

    def averaged(self) -> NDArray[np.float64]:
        """Return the mean over layers and heads: [tokens, tokens]."""
        return self.attention.mean(axis=(0, 1))

    def inter(self, later: int, earlier: int) -> float:
        """Return Eq. 3: the attention of one chunk's tokens to an earlier one."""
        a, b = self.spans[later], self.spans[earlier]
        return float(self.averaged()[a.start : a.end, b.start : b.end].sum())

    def intra(self, number: int) -> float:
        """Return Eq. 4: attention within a chunk, to earlier tokens."""
        span = self.spans[number]
        return float(np.tril(self.averaged()[span.start : span.end, span.start : span.end], k=-1).sum())

    def statistics(self, number: int) -> ChunkStatistics:
        """Return what is measured when a chunk of this prompt is captured."""
        span, before = self.spans[number], self.spans[:number]
        rows = self.averaged()[span.start : span.end]
        outside = sum((rows[:, b.start : b.end].sum(axis=1) for b in before), np.zeros(span.num_tokens))
        return ChunkStatistics(
            prefix=tuple(b.key for b in before),
            prefix_lengths=tuple(b.num_tokens for b in before),
            inter=tuple(self.inter(number, earlier) for earlier in range(number)),
            intra=self.intra(number),
            token_inter=tuple(outside.tolist()),
            context=span.context,
        )


def prompt(lengths: Sequence[int], *, static: int = 3, seed: int = 0) -> Prompt:
    """Return a prompt whose chunks, named by their numbers, have these lengths."""
    rng = np.random.default_rng(seed)
    num_tokens = static + sum(lengths)
    scores = 3.0 * rng.standard_normal((NUM_LAYERS, NUM_HEADS, num_tokens, num_tokens))
    weights = np.tril(np.exp(scores))
    return Prompt(tuple(spans(*enumerate(lengths), start=static)), weights / weights.sum(axis=-1, keepdims=True))


def key(name: int) -> ChunkKey:
    """Return the key of the chunk of that name."""
    return chunk_key([name])


def spans(*chunks: tuple[int, int], start: int = 0, gap: int = 0) -> list[ChunkSpan]:
    """Return chunks ``(name, length)`` one after the other, ``gap`` tokens apart, all of them 7."""
    placed: list[ChunkSpan] = []
    place, context = start, b""
    for name, length in chunks:
        placed.append(ChunkSpan(place, place + length, key(name), context))
        place, context = place + length + gap, context_behind(placed[-1], [7] * gap)
    return placed


def behind(names: Sequence[int], gap: int = 0) -> ContextKey:
    """Return the context of a chunk behind those of these names."""
    return spans(*((name, 1) for name in [*names, 0]), gap=gap)[-1].context


def statistics(
    num_tokens: int, prefix: Sequence[tuple[int, int, float]] = (), *, intra: float = 1.0
) -> ChunkStatistics:
    """Return statistics behind chunks ``(name, length, inter)``; later tokens looked more at them than earlier ones."""
    total = sum(mass for *_, mass in prefix)
    share = num_tokens * (num_tokens + 1) / 2
    return ChunkStatistics(
        prefix=tuple(key(name) for name, *_ in prefix),
        prefix_lengths=tuple(length for _, length, _ in prefix),
        inter=tuple(mass for *_, mass in prefix),
        intra=intra,
        token_inter=tuple(total * (i + 1) / share for i in range(num_tokens)),
        context=behind([name for name, *_ in prefix]),
    )


def variant(
    name: int,
    num_tokens: int,
    prefix: Sequence[tuple[int, int, float]] = (),
    *,
    number: int = 0,
    intra: float = 1.0,
    inherited: float = 0.0,
) -> ChunkVariant:
    """Return a stored variant of the chunk of that name."""
    measured = replace(statistics(num_tokens, prefix, intra=intra), inherited=inherited)
    return ChunkVariant(key(name), number, num_tokens, measured)


def token_scores(num_tokens: int) -> st.SearchStrategy[list[float]]:
    """A score for each token, from a seed: drawing them one by one takes Hypothesis long."""
    seeds = st.integers(0, 1 << 16)
    return seeds.map(lambda seed: np.random.default_rng(seed).random(num_tokens).round(1).tolist())


@st.composite
def variants(draw: st.DrawFn, name: int, num_tokens: int, number: int = 0) -> ChunkVariant:
    """Any variant of a chunk: captured behind any of ten others, with any attention."""
    prefix = draw(st.lists(st.integers(0, 9), max_size=5, unique=True))
    masses = st.floats(0.0, 50.0)
    measured = ChunkStatistics(
        prefix=tuple(key(other) for other in prefix),
        prefix_lengths=tuple(draw(st.integers(1, 20)) for _ in prefix),
        inter=tuple(draw(masses) for _ in prefix),
        intra=draw(masses),
        token_inter=tuple(map(float, draw(token_scores(num_tokens)))),
        inherited=draw(st.sampled_from([0.0, 0.0, 0.2, 0.9])),
        context=behind(prefix),
    )
    return ChunkVariant(key(name), number, num_tokens, measured)
