"""How well a stored chunk fits a new prompt: overlap, order, context impact, and recompute overhead.

::

    beta  (Eq. 6)   of what the chunk looked at when it was captured, how much stands before it now
    gamma (Eq. 7)   how much of that stands in another order
    beta' (Eq. 8)   beta (1 - gamma)
    CCI   (Eq. 11)  how much of its KV comes from elsewhere: 1/2 nothing, 1 all
    CFO   (Eq. 12)  the fraction of its tokens to recompute: alpha CCI (1 - beta')

All of Cache-Craft §3.1 and §3.2. Ours, for chunks that are recomputed wholly or not at all::

    outward            of all its attention, how much leaves the chunk
    neighbour overlap  of what it paid to other chunks, how much went to those that stand right before it again
    inherited          of its attention, how much went to chunks that had lost their own context when it was captured
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ragcache_core.chunk.types import ChunkKey, ChunkStatistics, ContextKey
from ragcache_core.errors import ConfigError

LEAST_LOST = 2.0**-20
"""The least loss of a chunk with KV that differs from a prefill's: an alpha of 1e9 detects it, one of 2 does not."""

_LEAST_OVERHEAD = 1e-4
"""A smaller CFO is none: it would have one token of each chunk recomputed."""


def prefix_overlap(statistics: ChunkStatistics, prefix: Sequence[ChunkKey]) -> float:
    """Return beta in [0, 1]: the share of attention to chunks that are in ``prefix`` again (Eq. 6).

    A chunk that had looked at nothing fits a prefix that has nothing which it had not seen (1), and no other (0).
    """
    present = set(prefix)
    total = math.fsum(statistics.inter)
    if total <= 0.0:
        return 1.0 if present <= set(statistics.prefix) else 0.0
    common = math.fsum(mass for key, mass in zip(statistics.prefix, statistics.inter, strict=True) if key in present)
    return min(1.0, common / total)


def order_penalty(old: Sequence[ChunkKey], new: Sequence[ChunkKey]) -> float:
    """Return gamma in [0, 1]: the normalised Kendall tau distance of the chunks in both prefixes (Eq. 7).

    A chunk that a prefix has twice counts where it stands first. Fewer than two common chunks are in no wrong order.
    """
    place = {key: number for number, key in reversed(list(enumerate(new)))}
    places = [place[key] for key in dict.fromkeys(old) if key in place]
    num_pairs = len(places) * (len(places) - 1) // 2
    if not num_pairs:
        return 0.0
    num_discordant = sum(earlier > later for i, earlier in enumerate(places) for later in places[i + 1 :])
    return num_discordant / num_pairs


def adjusted_overlap(statistics: ChunkStatistics, prefix: Sequence[ChunkKey], *, unseen_tokens: int = 0) -> float:
    """Return beta' in [0, 1]: the overlap, reduced by the order penalty (Eq. 8).

    We differ if ``unseen_tokens`` is given. Eq. 6 asks what has gone and not what has come: behind ``[A, B]`` a chunk
    that was captured behind ``[A]`` has beta 1, though it never saw B. Each of the ``unseen_tokens`` of such chunks is
    expected to get the attention that a token of the old prefix got, which adds as much to Eq. 6's denominator.
    """
    overlap = prefix_overlap(statistics, prefix) * (1.0 - order_penalty(statistics.prefix, prefix))
    num_seen = sum(statistics.prefix_lengths)
    return overlap * num_seen / (num_seen + unseen_tokens) if unseen_tokens else overlap


def context_impact(statistics: ChunkStatistics) -> float:
    """Return the CCI of a chunk in [1/2, 1]: the sigmoid of outer over inner attention, per token pair (Eq. 9-11).

    Masses are averaged over layers already (Eq. 10). A chunk of one token, which has no inner attention, has 1 as soon
    as it looked at anything.
    """
    num_tokens = len(statistics.token_inter)
    lengths = statistics.prefix_lengths
    outer = math.fsum(mass / (num_tokens * length) for mass, length in zip(statistics.inter, lengths, strict=True))
    inner = statistics.intra / num_tokens**2
    if outer <= 0.0:
        return 0.5
    return 1.0 / (1.0 + math.exp(-outer / inner)) if inner > 0.0 else 1.0


def outward_attention(statistics: ChunkStatistics) -> float:
    """Return the share of a chunk's attention to tokens outside of it, with the static prefix, in [0, 1].

    ``1 - intra / |C|``. CCI divides by lengths and lies close to 1/2 for whatever is captured behind long prefixes;
    this tells a chunk that begins with "It" from one that names what it is about.
    """
    return max(0.0, 1.0 - statistics.intra / len(statistics.token_inter))


def neighbour_overlap(statistics: ChunkStatistics, prefix: Sequence[ChunkKey]) -> float:
    """Return the share of attention to chunks that directly precede the chunk again, in [0, 1].

    Only the longest common ending of both prefixes counts: what "It" means is decided by what stands before it, so a
    chunk that came between an old neighbour and this one ends the context that was captured. Equal prefixes have 1.
    """
    old = statistics.prefix
    if tuple(prefix) == old:
        return 1.0
    num_common = 0
    for before, now in zip(reversed(old), reversed(prefix), strict=False):
        if before != now:
            break
        num_common += 1
    total = math.fsum(statistics.inter)
    kept = math.fsum(statistics.inter[len(old) - num_common :])
    return min(1.0, kept / total) if total > 0.0 else 0.0


def lost_context(statistics: ChunkStatistics, context: ContextKey, *, weight: float, overlap: float) -> float:
    """Return the share of a chunk's former context that is missing, in [0, 1]: at least ``weight * (1 - overlap)``.

    ``weight`` says how much comes from elsewhere: CCI with beta', or outward attention with neighbour overlap. In
    another ``context`` than at its capture a chunk has lost :data:`LEAST_LOST` at least: only the text between the same
    chunks may be new. What was captured behind chunks that had lost their own context is off by what it inherited,
    however well it fits. Where chunks are recomputed wholly or not at all, and without a limit, that changes nothing
    under the alpha that it was captured under: a chunk that loses ``1 / alpha`` is recomputed, so nothing inherits as
    much.
    """
    lost = max(weight * (1.0 - overlap), 0.0 if context == statistics.context else LEAST_LOST)
    return max(lost, statistics.inherited)


def fix_overhead(lost: float, alpha: float) -> float:
    """Return the CFO in [0, 1]: the share of a chunk to recompute, ``alpha * CCI * (1 - beta')`` (Eq. 12).

    We differ where that is less than 1e-4: it is nothing then, and not a token of each chunk.

    Args:
        lost: how much of its context the chunk has lost, see :func:`lost_context`.
        alpha: how much of a chunk that is worth.

    Raises:
        ConfigError: ``alpha`` is negative or not a number.
    """
    if not alpha >= 0.0:
        raise ConfigError(f"alpha is {alpha!r}; it must be 0 or more: 0 recomputes nothing, 2 or more all that changed")
    overhead = alpha * lost  # no number where alpha has no bound and nothing is lost
    return min(1.0, overhead) if overhead >= _LEAST_OVERHEAD else 0.0


def num_selected(overhead: float, num_tokens: int) -> int:
    """Return N, the number of a chunk's tokens to recompute: ``ceil(CFO * |C|)`` (§3.2.1).

    A product that is whole but for rounding stays whole.
    """
    return min(num_tokens, math.ceil(overhead * num_tokens - 1e-9))
