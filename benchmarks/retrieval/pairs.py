"""Two ways of doing the same, timed in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Comparison:
    """Times of a baseline and of its rival in seconds, pair by pair: ``baseline_s[i]`` ran next to ``rival_s[i]``."""

    name: str
    baseline_s: tuple[float, ...]
    rival_s: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Median over the pairs of rival / baseline: 1.05 is 5 % slower."""
        return float(np.median(np.array(self.rival_s) / np.array(self.baseline_s)))

    def to_dict(self) -> dict[str, float | str | int]:
        return {
            "name": self.name,
            "pairs": len(self.baseline_s),
            "baseline_p50_ms": _percentile_ms(self.baseline_s, 50),
            "baseline_p99_ms": _percentile_ms(self.baseline_s, 99),
            "rival_p50_ms": _percentile_ms(self.rival_s, 50),
            "rival_p99_ms": _percentile_ms(self.rival_s, 99),
            "ratio": round(self.ratio, 3),
        }


def compare(
    name: str, baseline: Callable[[int], object], rival: Callable[[int], object], *, pairs: int, warm_up: int = 3
) -> Comparison:
    """Run both with 0, 1, 2, ... in turn, the first of each pair alternating, and return their times."""
    for i in range(warm_up):
        baseline(i)
        rival(i)
    times: tuple[list[float], list[float]] = ([], [])
    for i in range(pairs):
        order = (0, 1) if i % 2 == 0 else (1, 0)
        for side in order:
            started_s = time.perf_counter()
            (baseline, rival)[side](i)
            times[side].append(time.perf_counter() - started_s)
    return Comparison(name, tuple(times[0]), tuple(times[1]))


def table(rows: Sequence[Comparison], baseline: str, rival: str) -> str:
    """Return a table of comparisons."""
    line = "{:<44}  {:>6}  {:>12}  {:>12}  {:>12}  {:>12}  {:>7}"
    heads = ("", "pairs", f"{baseline} p50", "p99 ms", f"{rival} p50", "p99 ms", "ratio")
    lines = [line.format(*heads)]
    for row in rows:
        d = row.to_dict()
        figures = (f"{d[key]:.3f}" for key in ("baseline_p50_ms", "baseline_p99_ms", "rival_p50_ms", "rival_p99_ms"))
        lines.append(line.format(row.name, d["pairs"], *figures, f"{row.ratio:.3f}"))
    return "\n".join(lines)


def _percentile_ms(times_s: Sequence[float], percent: float) -> float:
    return round(float(np.percentile(times_s, percent)) * 1000, 4)
