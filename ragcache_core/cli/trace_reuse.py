"""How a trace's documents come again, as tables and plots: what ``ragcache trace show`` has to say of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ragcache_core.reports.page import Report, Table
    from ragcache_core.sim.traces.reuse import TraceReuse, TraceSummary

_UNITS = ((86_400, "day"), (3_600, "hour"), (60, "minute"), (1, "second"))


def reuse_tables(reuse: TraceReuse) -> list[Table]:
    """Return what ``reuse`` says, a few rows each; what has nothing to say is left out."""
    from ragcache_core.reports.page import Table

    tables = []
    lengths = {"a prompt": reuse.prompt_tokens, "a document": reuse.document_tokens, "an answer": reuse.output_tokens}
    rows = [(name, *(f"{value:,.0f}" for _, value in of)) for name, of in lengths.items() if of]
    tables.append(Table("Tokens", ("quantile", *(f"{q:.0%}" for q, _ in reuse.prompt_tokens)), rows, 1))
    shares = [(name, f"{share:.1%}") for name, share in reuse.shares_of_prompts.items()]
    tables.append(Table("Of all prompts", ("part", "tokens"), shares, 1))
    if not reuse.top_documents:
        return tables
    tops = [(f"{top:.0%}", f"{share:.1%}") for top, share in reuse.top_documents]
    tables.append(Table("Popularity", ("top documents", "of retrievals"), tops, 1))
    within = [(_duration(seconds), f"{share:.1%}") for seconds, share in reuse.returns_within_s]
    tables.append(Table("Retrieved again", ("within", "of retrievals"), within, 1))
    by_position = [
        (str(one.position), f"{one.num_retrievals:,}", f"{one.anywhere:.1%}", f"{one.same_prefix:.1%}")
        for one in reuse.positions
    ]
    by_position.append(("all, by tokens", "", f"{reuse.anywhere_tokens:.1%}", f"{reuse.same_prefix_tokens:.1%}"))
    tables.append(Table("Come again", ("position", "retrievals", "anywhere", "behind the same"), by_position, 1))
    known = [(f"{share:.0%}", f"{of:.1%}") for share, of in reuse.known_documents]
    tables.append(Table("Known documents", ("at least", "of requests"), known, 1))
    sources = [(str(number), f"{share:.1%}") for number, share in reuse.sources]
    if sources:
        tables.append(Table("Documents that all came before, last in", ("requests", "share"), sources, 1))
    together = [("pairs of documents", f"{reuse.repeated_pairs:.1%}"), ("whole sets", f"{reuse.repeated_sets:.1%}")]
    tables.append(Table("Together again", ("what", "share"), together, 1))
    return tables


def reuse_report(name: str, summary: TraceSummary, reuse: TraceReuse) -> Report:
    """Return the same with plots. The trace has the file ``name``."""
    from ragcache_core.reports.page import Report
    from ragcache_core.reports.plots import lines

    plots = []
    if reuse.top_documents:
        plots = [
            lines(
                "Popularity", "most popular, %", "share of retrievals",
                {
                    "documents": _percent(reuse.top_documents),
                    **({"sets of documents": _percent(reuse.top_sets)} if reuse.top_sets else {}),
                },
                log_x=True,
            ),
            lines(
                "Known documents", "at least this share of a request's documents came before, %", "share of requests",
                {"requests": _percent(reuse.known_documents)},
            ),
            lines(
                "Reuse by time", "seconds since the document's last retrieval", "share of retrievals",
                {"retrieved again within": reuse.returns_within_s}, log_x=True,
            ),
            lines(
                "Reuse by position", "position in the prompt", "share that comes again",
                {
                    "anywhere": [(one.position, one.anywhere) for one in reuse.positions],
                    "behind the same documents": [(one.position, one.same_prefix) for one in reuse.positions],
                },
            ),
        ]  # fmt: skip
    plots.append(
        lines(
            "Lengths", "tokens", "share of at most as many",
            {
                part: [(max(tokens, 1.0), share) for share, tokens in of]
                for part, of in (("prompts", reuse.prompt_tokens), ("documents", reuse.document_tokens),
                                 ("answers", reuse.output_tokens))
                if of
            },
            log_x=True,
        )
    )  # fmt: skip
    lead = [
        f"{name}: {summary.num_requests:,} requests in {summary.duration_s:,.0f} s, {summary.num_documents:,} "
        f"documents retrieved {summary.num_retrievals:,} times."
    ]
    return Report("What comes again", lead, plots, reuse_tables(reuse))


def _percent(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(100 * x, y) for x, y in points]


def _duration(seconds: float) -> str:
    size, unit = next((size, unit) for size, unit in _UNITS if seconds >= size)
    count = round(seconds / size)
    return f"{count} {unit}{'s' if count > 1 else ''}"
