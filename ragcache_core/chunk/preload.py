"""How many layers of stored KV to have at hand before the first is computed, and whether loading pays at all."""

from __future__ import annotations

import math


def preload_depth(num_layers: int, *, prefill_s: float, load_s: float) -> int:
    """Return L_p, how many layers to load before the first is computed so that none is waited for (Eq. 16).

    ``(L - 1)(1 - T_prefill / T_load) + 1``, rounded up, at least 1 (Algorithm 2, line 1). ``prefill_s`` and ``load_s``
    are those of all layers. With it the remaining ``L - L_p`` layers are loaded while ``L - 1`` are computed.

    Raises:
        ValueError: no layers, or a negative time.
    """
    _check(num_layers, prefill_s, load_s)
    if load_s <= prefill_s:
        return 1
    return min(num_layers, math.ceil((num_layers - 1) * (1.0 - prefill_s / load_s) + 1.0 - 1e-9))


def prefill_with_load_s(num_layers: int, *, prefill_s: float, load_s: float, queued_s: float = 0.0) -> float:
    """Return the seconds from a request's turn to the end of its prefill, when layers are loaded ahead.

    The ``queued_s`` before its turn are for loading already (§3.5). Afterwards a layer is computed once it is loaded
    and the one before it is computed. With equal layers, either nothing is waited for but the first, or the last is.

    Raises:
        ValueError: no layers, or a negative time.
    """
    _check(num_layers, prefill_s, load_s)
    after_first = load_s / num_layers - queued_s + prefill_s
    after_last = load_s - queued_s + prefill_s / num_layers
    return max(prefill_s, after_first, after_last)


def loading_pays(
    num_layers: int, *, full_prefill_s: float, partial_prefill_s: float, load_s: float, queued_s: float = 0.0
) -> bool:
    """Return whether stored KV and a partial prefill end sooner than a prefill from scratch (§3.5).

    The paper uses what has arrived when the request's turn comes and computes everything otherwise; we also count what
    arrives while it is computed.
    """
    partial = prefill_with_load_s(num_layers, prefill_s=partial_prefill_s, load_s=load_s, queued_s=queued_s)
    return partial < full_prefill_s


def _check(num_layers: int, prefill_s: float, load_s: float) -> None:
    if num_layers < 1 or not prefill_s >= 0.0 or not load_s >= 0.0:
        raise ValueError(
            f"{num_layers} layers, {prefill_s} s of prefill, {load_s} s of loading: one layer, no less than 0 s"
        )
