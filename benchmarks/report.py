"""What a benchmark reports: figures with their baselines, the goals they are held against, one table."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Goal:
    """A bound on one figure: ``sign`` is ``<``, ``<=``, ``>=``, ``>`` or ``=``."""

    sign: str
    bound: float

    def is_met(self, value: float) -> bool:
        """Return whether ``value`` keeps to the bound."""
        return _SIGNS[self.sign](value, self.bound)

    def __str__(self) -> str:
        return f"{self.sign} {self.bound:g}"


_SIGNS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">=": operator.ge,
    ">": operator.gt,
    "=": operator.eq,
}

Goals = Mapping[str, Goal]
"""What figures have to reach; one without a goal is there to be read beside one that has."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One number. ``p50_ms`` and ``p99_ms`` are of whatever was timed for it; ``baseline`` ran beside it."""

    key: str
    value: float
    baseline: float | None = None
    p50_ms: float | None = None
    p99_ms: float | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Part:
    """What one measurement found: its figures, how it was warmed up, and what lies behind the figures."""

    warm_up: str
    figures: tuple[Figure, ...]
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BenchmarkPlan:
    """What every measurement is told.

    Attributes:
        kept_at: the file of finished runs, for measurements that keep them.
        found: the figures of the parts that are measured, by their keys.
    """

    model: str
    corpus: Path
    seed: int
    is_quick: bool
    report: Callable[[str], None]
    kept_at: Path | None = None
    found: Mapping[str, float] = field(default_factory=dict)

    def sized(self, full: int, quick: int) -> int:
        """Return how much to do."""
        return quick if self.is_quick else full


class PlanProgress:
    """Progress of a comparison of engines in the bar of a benchmark."""

    def __init__(self, plan: BenchmarkPlan, name: str) -> None:
        self._plan, self._name = plan, name
        self._num_done = self._num_requests = 0

    def plan(self, num_requests: int) -> None:
        """Set the number of requests."""
        self._num_requests = num_requests

    def show(self, what: str) -> None:
        """Show the current step."""
        self._plan.report(f"{self._name}: {self._num_done} of {self._num_requests} requests, {what}")

    def advance(self) -> None:
        """Count one more answer."""
        self._num_done += 1


def percentiles_ms(times_s: Sequence[float]) -> tuple[float, float]:
    """Return the median and the 99th percentile in milliseconds."""
    p50, p99 = np.percentile(np.asarray(times_s) * 1000, (50, 99))
    return round(float(p50), 4), round(float(p99), 4)


def to_json(part: Part, facts: Mapping[str, object]) -> dict[str, Any]:
    """Return a part as plain JSON data, with the facts of the run that measured it."""
    return {
        **facts,
        "warm_up": part.warm_up,
        "figures": [asdict(figure) for figure in part.figures],
        "details": dict(part.details),
    }


def key_of(name: str, seed: int) -> str:
    """Return the key of a part in a report: its name, with ``@`` and the seed if that is not 0."""
    return f"{name}@{seed}" if seed else name


def merged(report: Mapping[str, Any], name: str, part: Mapping[str, Any], goals: Goals) -> dict[str, Any]:
    """Return a report with a part in place of an earlier one, and each figure by its key: its median over the seeds.

    A goal holds for every seed. What other seeds gave stays, if it is of the same commit, machine and model.
    """
    key = key_of(name, part["seed"])
    parts = {
        other: each
        for other, each in report.get("parts", {}).items()
        if other.partition("@")[0] != name or _facts(each) == _facts(part)
    }
    parts[key] = dict(part)
    values: dict[str, list[float]] = {}
    for figure in (figure for each in parts.values() for figure in each["figures"]):
        values.setdefault(figure["key"], []).append(figure["value"])
    met = {key: all(map(goals[key].is_met, found)) for key, found in values.items() if key in goals}
    return {
        **{key: found[0] if len(found) == 1 else float(np.median(found)) for key, found in values.items()},
        "goals_missed": [key for key, is_met in met.items() if not is_met],
        "goals_not_measured": sorted(goals.keys() - met.keys()),
        "parts": parts,
    }


def _facts(part: Mapping[str, Any]) -> dict[str, Any]:
    measured = ("seed", "warm_up", "figures", "details", "seconds")
    return {key: value for key, value in part.items() if key not in measured}


def read_report(path: Path) -> dict[str, Any]:
    """Return the report in a file; an empty one where there is none."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return report if isinstance(report, dict) else {}


def table(figures: Iterable[Mapping[str, Any]], goals: Goals) -> str:
    """Return the table of figures as :func:`to_json` gives them."""
    figures = list(figures)
    width = max((len(figure["key"]) for figure in figures), default=0)
    line = f"{{:<{width}}} " + "{:>12} {:>12} {:>10} {:>10}  {:<9} {:<6} {}"
    lines = [line.format("figure", "value", "baseline", "p50 ms", "p99 ms", "goal", "", "")]
    for figure in figures:
        goal = goals.get(figure["key"])
        verdict = "" if goal is None else "met" if goal.is_met(figure["value"]) else "MISSED"
        numbers = (_shown(figure[name]) for name in ("value", "baseline", "p50_ms", "p99_ms"))
        lines.append(line.format(figure["key"], *numbers, str(goal or ""), verdict, figure["note"]).rstrip())
    return "\n".join(lines)


def _shown(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.4g}"
