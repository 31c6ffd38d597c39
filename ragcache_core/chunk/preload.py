"""The number of layers of stored KV to load before computing the first."""

from __future__ import annotations

import math


def preload_depth(num_layers: int, *, prefill_s: float, load_s: float) -> int:
    """Return L_p, the number of layers to load before the first is computed, so that no later one waits (Eq. 16).

    ``(L - 1)(1 - T_prefill / T_load) + 1``, rounded up, at least 1 (Algorithm 2, line 1). ``prefill_s`` and ``load_s``
    are those of all layers. Then the remaining ``L - L_p`` layers are loaded while ``L - 1`` are computed.

    Raises:
        ValueError: no layers, or a negative time.
    """
    _check(num_layers, prefill_s, load_s)
    if load_s <= prefill_s:
        return 1
    return min(num_layers, math.ceil((num_layers - 1) * (1.0 - prefill_s / load_s) + 1.0 - 1e-9))


def _check(num_layers: int, prefill_s: float, load_s: float) -> None:
    if num_layers < 1 or not prefill_s >= 0.0 or not load_s >= 0.0:
        raise ValueError(
            f"{num_layers} layers, {prefill_s} s of prefill, {load_s} s of loading: one layer, no less than 0 s"
        )
