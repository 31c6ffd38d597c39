"""What the check prints: agreements, ceilings, a table of speeds, the prefill profile."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple

from benchmarks.kernels.agreement import Agreement
from benchmarks.kernels.ceilings import Ceilings
from benchmarks.kernels.prefill import PrefillProfile
from benchmarks.kernels.speeds import Speed
from ragcache_kernels.scattered_attention import Tiles

_BANDWIDTH_GOAL = 0.8


def agreements(found: Sequence[Agreement]) -> str:
    """Return how many kernels agree with their references, and each that does not."""
    lines = [f"against the PyTorch twins: {sum(one.is_met for one in found)} of {len(found)} agree"]
    for one in found:
        if not one.is_met:
            why = one.failure or f"differs by {one.error:.2g}, {one.tolerance:.2g} is allowed"
            lines.append(f"  {one.operation}, {one.shape}: {why}")
    return "\n".join(lines)


def ceilings(measured: Ceilings) -> str:
    """Return the ceilings in one line."""
    return (
        f"ceilings of this run: copy {measured.copy_bytes_per_s / 1e9:,.0f} GB/s read and written, bf16 product "
        f"{measured.matmul_flop_per_s / 1e12:,.1f} TFLOP/s, pinned host to device "
        f"{measured.host_to_device_bytes_per_s / 1e9:,.1f} GB/s, back {measured.device_to_host_bytes_per_s / 1e9:,.1f}"
    )


def speeds(measured: Iterable[Speed], limits: Ceilings) -> str:
    """Return a table: time, achieved bytes and FLOP a second, their shares of the ceilings, and the baselines."""
    head = ("kernel", "case", "ms", "GB/s", "share", "TFLOP/s", "share", "twin", "SDPA", "vLLM", "goal")
    rows: list[Sequence[str]] = [head]
    notes = []
    for one in measured:
        bytes_per_s, flop_per_s = one.num_bytes / one.seconds, one.num_flop / one.seconds
        rows.append(
            (
                one.operation,
                one.case,
                f"{one.seconds * 1e3:.3f}",
                f"{bytes_per_s / 1e9:,.0f}",
                f"{bytes_per_s / limits.copy_bytes_per_s:.0%}",
                f"{flop_per_s / 1e12:.1f}" if one.num_flop else "",
                f"{flop_per_s / limits.matmul_flop_per_s:.0%}" if one.num_flop else "",
                *(_times(other, one.seconds) for other in (one.twin_s, one.masked_sdpa_s, one.stock_s)),
                _verdict(one, limits),
            )
        )
        link_rate = limits.device_to_host_bytes_per_s if "from" in one.operation else limits.host_to_device_bytes_per_s
        link = f"{one.link_bytes / one.seconds / link_rate:.0%} of the pinned link" if one.link_bytes else ""
        notes += [f"  {one.operation}, {one.case}: {note}" for note in (link, one.note) if note]
    explanation = "twin, SDPA (with the mask as a matrix), vLLM: how many times as long they take"
    return "\n".join([*_aligned(rows), explanation, *notes])


def tiles(measured: Iterable[tuple[Tiles, float]]) -> str:
    """Return how long scattered attention takes in each kind of tile, the fastest first."""
    rows: list[Sequence[str]] = [("queries", "keys", "warps", "stages", "ms")]
    for each, seconds in sorted(measured, key=lambda pair: pair[1]):
        rows.append((*map(str, astuple(each)), f"{seconds * 1e3:.3f}"))
    return "\n".join(["tiles of scattered_attention, runs of 1", *_aligned(rows)])


def prefill(profile: PrefillProfile) -> str:
    """Return T(cached, new) as a table in milliseconds."""
    rows: list[Sequence[str]] = [("cached \\ new", *(f"{new:,}" for new in profile.new_tokens))]
    for cached, times in zip(profile.cached_tokens, profile.seconds, strict=True):
        rows.append((f"{cached:,}", *(f"{time_s * 1e3:.2f}" for time_s in times)))
    return "\n".join(["prefill of a model of Llama-3-8B's shape, ms", *_aligned(rows)])


def misses_goal(speed: Speed, limits: Ceilings) -> bool:
    """Return whether a kernel was measured against its goal and does not reach it."""
    return _verdict(speed, limits).endswith("missed")


def _verdict(speed: Speed, limits: Ceilings) -> str:
    if "copy" in speed.goal:
        is_met = speed.num_bytes / speed.seconds >= _BANDWIDTH_GOAL * limits.copy_bytes_per_s
    elif "stock" in speed.goal and speed.stock_s is not None:
        is_met = speed.seconds < speed.stock_s
    else:
        return speed.goal
    return f"{speed.goal}: {'met' if is_met else 'missed'}"


def _times(other_s: float | None, seconds: float) -> str:
    return "" if other_s is None else f"{other_s / seconds:.2f}x"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column < 2 or column == len(row) - 1 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
