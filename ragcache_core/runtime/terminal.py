"""Progress bars and text tables, drawn with rich, which is imported at first use."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.progress import Progress, TaskID
    from rich.table import Table

_BAR_CELLS = 24
_REDRAWN_PER_S = 4  # redrawing takes time from a measurement
_ENDLESS = 100_000
_LINE_EVERY_S = 60.0


class Bar:
    """A progress bar on standard error that counts finished ``unit``; a context manager.

    It is drawn where standard error is a terminal, unless ``enabled`` says otherwise, and taken away in the end, unless
    it ``is_kept``. What is written to the terminal meanwhile stands above it. Elsewhere, as in a log, one line a minute
    says how far it is, unless ``enabled`` is false.
    """

    def __init__(
        self,
        what: str,
        total: int | None = None,
        unit: str = "",
        *,
        enabled: bool | None = None,
        is_kept: bool = False,
        has_remaining: bool = True,
    ) -> None:
        self.what, self.total, self.num_done = what, total, 0
        self._unit, self._is_kept, self._has_remaining = unit, is_kept, has_remaining
        self._enabled = sys.stderr.isatty() if enabled is None else enabled
        self._has_lines = enabled is None and not self._enabled
        self._began_s = self._line_s = time.monotonic()
        self._drawn: tuple[Progress, TaskID] | None = None

    def __enter__(self) -> Self:
        if self._enabled:
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeElapsedColumn,
                TimeRemainingColumn,
            )

            progress = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(_BAR_CELLS),
                MofNCompleteColumn(),
                TextColumn(self._unit, markup=False),
                TimeElapsedColumn(),
                *((TextColumn("left"), TimeRemainingColumn(compact=True)) if self._has_remaining else ()),
                console=Console(stderr=True),
                transient=not self._is_kept,
                refresh_per_second=_REDRAWN_PER_S,
                redirect_stdout=sys.stdout.isatty(),  # only on a terminal
            )
            progress.start()
            self._drawn = progress, progress.add_task(self.what, total=self.total)
        return self

    def advance(self, num_done: int = 1) -> None:
        """Count ``num_done`` more."""
        self.move_to(self.num_done + num_done)

    def move_to(self, num_done: int, total: int | None = None) -> None:
        """Set the number of finished ones, and the total if known."""
        self.num_done = num_done
        self.total = self.total if total is None else total
        if self._drawn is not None:
            progress, task = self._drawn
            progress.update(task, completed=num_done, total=self.total)
        elif self._has_lines and (now_s := time.monotonic()) - self._line_s >= _LINE_EVERY_S:
            self._line_s = now_s
            of = "" if self.total is None else f" of {self.total:,}"
            minutes = f"{(now_s - self._began_s) / 60:.0f} min"
            sys.stderr.write(f"{self.what}: {num_done:,}{of} {self._unit} after {minutes}\n")
            sys.stderr.flush()

    def show(self, what: str) -> None:
        """Show the present step."""
        self.what = what
        if self._drawn is not None:
            progress, task = self._drawn
            progress.update(task, description=what)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._drawn is not None:
            self._drawn[0].stop()
            self._drawn = None


def columns(rows: Iterable[Sequence[RenderableType]], alignment: str, heads: Sequence[str] = ()) -> Table:
    """Return a table without lines; ``alignment`` has ``<`` or ``>`` per column. Markup is not interpreted."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=bool(heads), header_style="bold")
    for side, head in zip(alignment, heads or [""] * len(alignment), strict=True):
        table.add_column(Text(head), justify="left" if side == "<" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table


def plain(drawn: RenderableType) -> str:
    """Return text without colours and trailing blanks, with lines of any length."""
    from rich.console import Console

    file = io.StringIO()
    Console(file=file, width=_ENDLESS, color_system=None, force_terminal=False).print(drawn)
    return "\n".join(line.rstrip() for line in file.getvalue().rstrip("\n").split("\n"))
