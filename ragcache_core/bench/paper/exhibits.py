"""``ragcache bench paper``: figures and tables of the RAGCache paper, and of Cache-Craft, beside ours, in simulation.

Nothing is tuned to look right: settings are those that the paper's text gives, what it does not give is named with the
figure, and a row that does not agree says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ragcache_core.bench.machine import machine
from ragcache_core.bench.paper.cache_craft import figure_22, figure_24
from ragcache_core.bench.paper.exhibit import Exhibit
from ragcache_core.bench.paper.large_models import figure_16
from ragcache_core.bench.paper.policies import figure_17, table_2
from ragcache_core.bench.paper.reordering import figure_18
from ragcache_core.bench.paper.request_rate import figure_13, figure_14, figure_15, table_4
from ragcache_core.bench.paper.runs import FIRST_SEED, MISTRAL, PaperRuns
from ragcache_core.bench.paper.search import figure_19, table_3
from ragcache_core.reports.page import Report

EXHIBITS: Mapping[str, Callable[[PaperRuns], Exhibit]] = MappingProxyType(
    {
        "figure 13": figure_13,
        "figure 14": figure_14,
        "figure 15": figure_15,
        "figure 16": figure_16,
        "figure 17": figure_17,
        "table 2": table_2,
        "figure 18": figure_18,
        "figure 19": figure_19,
        "table 3": table_3,
        "table 4": table_4,
        "cache-craft 22": figure_22,
        "cache-craft 24": figure_24,
    }
)
"""In the order in which they are measured; those that share runs stand together."""


def measure(names: Iterable[str], runs: PaperRuns) -> Iterator[Exhibit]:
    """Yield the exhibits of these names, each as soon as it is measured.

    Raises:
        ConfigError: of the first run that failed. KeyError: there is no such exhibit.
    """
    for name in names:
        yield EXHIBITS[name](runs)


def paper_report(exhibits: Sequence[Exhibit], num_seeds: int, num_requests: int | None) -> Report:
    """Return the exhibits as a report, with how many traces of how many requests each was simulated."""
    amount = "as many requests as arrive in an hour" if num_requests is None else f"{num_requests:,} requests"
    seeds = "1 trace" if num_seeds == 1 else f"{num_seeds} traces"
    lead = [
        f"Simulated in virtual time, means over {seeds} of each kind, {amount} each.",
        f"Cost model {MISTRAL.cost_model}, but for curves that name another model.",
    ]
    return Report(
        "The papers beside ours",
        lead,
        [plot for exhibit in exhibits for plot in exhibit.plots],
        [table for exhibit in exhibits for table in exhibit.all_tables()],
        notes=[f"{exhibit.name}, {says}: {what}" for exhibit in exhibits for says, what in exhibit.notes()],
    )


def to_dict(exhibits: Sequence[Exhibit], runs: PaperRuns) -> dict[str, Any]:
    """Return plain JSON data: what it was simulated with, and the exhibits.

    The same for the same seeds and requests, but for Table 4, which is measured.
    """
    return {
        "machine": machine(),
        "seeds": [FIRST_SEED, FIRST_SEED + runs.num_seeds - 1],
        "requests": runs.num_requests,
        "exhibits": [exhibit.to_dict() for exhibit in exhibits],
    }
