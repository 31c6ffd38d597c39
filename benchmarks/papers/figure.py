"""One figure or table of the paper beside ours: rows, what agrees, what does not and why."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from textwrap import fill
from typing import TYPE_CHECKING, Any, Literal

from benchmarks.papers.published import PublishedResult
from ragcache_core.reports.page import Table

if TYPE_CHECKING:
    from ragcache_core.reports.plots import Plot

TOLERANCE = 1.25
"""A single number agrees where ours is at most this many times larger or smaller."""

Verdict = Literal["agrees", "overlaps", "lower", "higher", ""]
_NAMED = 6
_WIDTH = 118


@dataclass(frozen=True, slots=True)
class Row:
    """One number of ours, or the range of several, beside the paper's.

    Attributes:
        paper: None for what is there to be read beside others.
        unit: behind both numbers.
        spread: of a single number, its standard deviation over the seeds.
        is_ragcache: it is of something that the paper does not have: it counts for no verdict.
    """

    what: str
    low: float
    high: float
    paper: PublishedResult | None
    unit: str = ""
    spread: float | None = None
    is_ragcache: bool = False

    @classmethod
    def of_seeds(
        cls,
        what: str,
        values: Sequence[float],
        paper: PublishedResult | None,
        unit: str = "",
        *,
        is_ragcache: bool = False,
    ) -> Row:
        """Return the mean of a number over the seeds."""
        spread = stdev(values) if len(values) > 1 else None
        return cls(what, fmean(values), fmean(values), paper, unit, spread, is_ragcache)

    @classmethod
    def of_range(
        cls,
        what: str,
        values: Iterable[float],
        paper: PublishedResult | None,
        unit: str = "",
        *,
        is_ragcache: bool = False,
    ) -> Row:
        """Return the range of several numbers."""
        several = list(values)
        return cls(what, min(several), max(several), paper, unit, None, is_ragcache)

    @property
    def ratios(self) -> tuple[float, float] | None:
        """Ours over the paper's, for the lower and the upper end; None where there is nothing to divide by."""
        if self.paper is None or math.isinf(self.paper.high) or not self.paper.low:
            return None
        return self.low / self.paper.low, self.high / self.paper.high

    @property
    def verdict(self) -> Verdict:
        """Whether ours agrees.

        A single number does within :data:`TOLERANCE`; a range does within the paper's, and overlaps it where it
        reaches beyond.
        """
        paper = self.paper
        if paper is None:
            return ""
        if not paper.is_range:
            ratio = self.high / paper.high
            return "agrees" if 1 / TOLERANCE <= ratio <= TOLERANCE else "higher" if ratio > 1.0 else "lower"
        if self.high < paper.low:
            return "lower"
        if self.low > paper.high:
            return "higher"
        return "agrees" if paper.low <= self.low and self.high <= paper.high else "overlaps"

    def cells(self) -> list[str]:
        """Return the row as text: what, the paper's, where it stands, ours, its spread, the ratio, the verdict."""
        paper, place = "", ""
        if self.paper is not None:
            paper, place = _shown(self.paper.low, self.paper.high, self.unit), self.paper.place
        ratio = "" if self.ratios is None else ", ".join(dict.fromkeys(map(_number, self.ratios)))
        spread = "" if self.spread is None else f"+-{_number(self.spread)}"
        verdict = "(ours)" if self.is_ragcache else self.verdict
        return [self.what, paper, place, _shown(self.low, self.high, self.unit), spread, ratio, verdict]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data; an end that is infinite is null."""
        paper = None if self.paper is None else asdict(self.paper)
        if paper is not None and math.isinf(paper["high"]):
            paper["high"] = None
        numbers = {"low": round(self.low, 6), "high": round(self.high, 6)}
        spread = None if self.spread is None else round(self.spread, 6)
        ratios = None if self.ratios is None else [round(ratio, 4) for ratio in self.ratios]
        return {
            "what": self.what,
            "paper": paper,
            "ours": numbers,
            "unit": self.unit,
            "spread": spread,
            "ratio": ratios,
            "verdict": self.verdict,
            "is_ragcache": self.is_ragcache,
        }


@dataclass(frozen=True, slots=True)
class PaperFigure:
    """A figure or a table of the paper, simulated.

    Attributes:
        setting: what was simulated, and what of it we had to assume.
        why: for rows that do not agree, what we know of the reason.
        engine: the command that measures the same on a real engine.
        tables: what lies behind the rows, or beside them.
        plots: the same, drawn.
    """

    name: str
    title: str
    setting: str
    rows: Sequence[Row]
    why: Sequence[str]
    engine: str
    tables: Sequence[Table] = ()
    plots: Sequence[Plot] = ()

    @property
    def compared(self) -> list[Row]:
        """The rows that have a number of the paper's and are of the paper's own systems."""
        return [row for row in self.rows if row.paper is not None and not row.is_ragcache]

    def reproduction(self) -> str:
        """Return a line that says how many rows agree, and which do not."""
        compared = self.compared
        if not compared:
            return "the paper has no number to compare"
        by_verdict: dict[Verdict, list[Row]] = {}
        for row in compared:
            by_verdict.setdefault(row.verdict, []).append(row)
        line = f"agrees in {len(by_verdict.get('agrees', []))} of {len(compared)} rows"
        for verdict, says in (("overlaps", "Overlaps in"), ("lower", "Lower in"), ("higher", "Higher in")):
            if rows := by_verdict.get(verdict):  # type: ignore[call-overload]
                line += f". {says} {len(rows)}: {_some(rows)}"
        return line

    @property
    def is_reproduced(self) -> bool:
        """Whether every row agrees."""
        return all(row.verdict == "agrees" for row in self.compared)

    def text(self) -> str:
        """Return everything but the plots, to read in a terminal."""
        tables = "\n\n".join(table.text() for table in self.all_tables())
        lines = [
            fill(f"{says}: {what}", _WIDTH, initial_indent="  ", subsequent_indent="    ")
            for says, what in self.notes()
        ]
        return "\n".join([tables, "", *lines])

    def markdown(self) -> str:
        """Return everything but the plots, as a section of a page."""
        heads = ("", "paper", "where", "ours", "spread", "ours / paper", "")
        parts = [f"#### {self.name}: {self.title}", _markdown_table(heads, [row.cells() for row in self.rows])]
        for table in self.tables:
            parts += [f"{table.title}:", _markdown_table(table.heads, table.rows)]
        parts.append("\n".join(f"- **{says}**: {what}" for says, what in self.notes()))
        return "\n\n".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return {
            "name": self.name,
            "title": self.title,
            "setting": self.setting,
            "rows": [row.to_dict() for row in self.rows],
            "reproduction": self.reproduction(),
            "why": list(self.why),
            "engine": self.engine,
            "tables": [{"title": t.title, "heads": list(t.heads), "rows": [*map(list, t.rows)]} for t in self.tables],
        }

    def all_tables(self) -> list[Table]:
        """Return the rows as a table, and the tables beside them."""
        heads = ("", "paper", "where", "ours", "spread", "ours/paper", "")
        return [Table(f"{self.name}: {self.title}", heads, [row.cells() for row in self.rows]), *self.tables]

    def notes(self) -> list[tuple[str, str]]:
        """Return (what it says, a few sentences) on how to read it."""
        why = [] if self.is_reproduced else [("why", reason) for reason in self.why]
        return [
            ("simulated", self.setting),
            ("reproduction", self.reproduction()),
            *why,
            ("on an engine", self.engine),
        ]


def _some(rows: Sequence[Row]) -> str:
    """Return the names of the rows, the farthest first; of many only the first."""

    def distance(row: Row) -> float:
        return max((abs(math.log(ratio)) for ratio in row.ratios or () if ratio > 0), default=0.0)

    names = [row.what for row in sorted(rows, key=distance, reverse=True)]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return "; ".join(names[:_NAMED]) + more


def _shown(low: float, high: float, unit: str) -> str:
    unit = f" {unit}" if unit else ""
    if math.isinf(high):
        return f"> {_number(low)}{unit}"
    first, last = _number(low), _number(high)
    return f"{first}{unit}" if first == last else f"{first} to {last}{unit}"


def _number(value: float) -> str:
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value >= 100 else f"{value:.2f}"


def _markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = ["---", *["---:"] * (len(heads) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [heads, rule, *rows])
