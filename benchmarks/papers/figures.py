"""Figures and tables of the RAGCache paper, and of Cache-Craft, compared with simulations of ours.

Nothing is tuned to look right: settings are those that the paper's text gives, what it does not give is named with the
figure, and a row that does not agree says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from benchmarks.papers.cache_craft import figure_22, figure_24
from benchmarks.papers.figure import PaperFigure
from benchmarks.papers.large_models import figure_16
from benchmarks.papers.policies import figure_17, table_2
from benchmarks.papers.reordering import figure_18
from benchmarks.papers.request_rate import figure_13, figure_14, figure_15, table_4
from benchmarks.papers.retrieval_skew import figure_6
from benchmarks.papers.runs import FIRST_SEED, MISTRAL, PaperRuns
from benchmarks.papers.search import figure_19, table_3
from benchmarks.papers.stored_chunks import figure_25, figure_29
from ragcache_core.reports.machine import machine
from ragcache_core.reports.page import Report

FIGURES: Mapping[str, Callable[[PaperRuns], PaperFigure]] = MappingProxyType(
    {
        "figure 6": lambda runs: figure_6(runs.searches, runs.questions),
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
        "cache-craft 25": figure_25,
        "cache-craft 29": figure_29,
    }
)
"""In the order in which they are measured; those that share runs stand together."""


def measure(names: Iterable[str], runs: PaperRuns) -> Iterator[PaperFigure]:
    """Yield the figures of these names, each as soon as it is measured.

    Raises:
        ConfigError: of the first run that failed. KeyError: there is no such figure.
    """
    for name in names:
        yield FIGURES[name](runs)


def paper_report(figures: Sequence[PaperFigure], num_seeds: int, num_requests: int | None) -> Report:
    """Return the figures as a report, with how many traces of how many requests each was simulated."""
    amount = "as many requests as arrive in an hour" if num_requests is None else f"{num_requests:,} requests"
    seeds = "1 trace" if num_seeds == 1 else f"{num_seeds} traces"
    lead = [
        f"Simulated in virtual time, means over {seeds} of each kind, {amount} each.",
        f"Cost model {MISTRAL.cost_model}, but for curves that name another model.",
    ]
    return Report(
        "The papers beside ours",
        lead,
        [plot for figure in figures for plot in figure.plots],
        [table for figure in figures for table in figure.all_tables()],
        notes=[f"{figure.name}, {says}: {what}" for figure in figures for says, what in figure.notes()],
    )


def to_dict(figures: Sequence[PaperFigure], runs: PaperRuns) -> dict[str, Any]:
    """Return plain JSON data: what it was simulated with, and the figures.

    The same for the same seeds and requests, but for Table 4, which is measured.
    """
    return {
        "machine": machine(),
        "seeds": [FIRST_SEED, FIRST_SEED + runs.num_seeds - 1],
        "requests": runs.num_requests,
        "figures": [figure.to_dict() for figure in figures],
    }
