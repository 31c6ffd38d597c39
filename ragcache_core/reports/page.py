"""Output of measurements and simulations: tables for a terminal, and reports as pages or pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragcache_core._version import __version__
from ragcache_core.private_files import make_folders, replacing
from ragcache_core.runtime.terminal import columns, plain

if TYPE_CHECKING:
    from ragcache_core.reports.plots import Plot

MIB = 2**20
_STYLE = """
:root { color-scheme: light dark; --line: #8886; --dim: #777; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.dim, .dim * { color: var(--dim); } .plots { display: flex; flex-wrap: wrap; gap: 1rem; }
figure { margin: 0; background: #fff; border-radius: 6px; padding: .4rem; }
figure svg { max-width: 100%; height: auto; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
.text { text-align: left; } .text:last-child { white-space: normal; overflow-wrap: anywhere; }
th { font-weight: 600; vertical-align: bottom; } small { color: var(--dim); }
.warn { border-left: 4px solid #d55e00; padding-left: .7rem; }
"""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells below headers; a cell may end in an interval, such as ``1.2 [1.1, 1.3]``.

    The first ``num_names`` columns are words, the others figures.
    """

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    num_names: int = 1

    def text(self) -> str:
        """Return the table as lines, without intervals."""
        rows = ([cell.partition(" [")[0] for cell in row] for row in self.rows)
        alignment = "<" * self.num_names + ">" * (len(self.heads) - self.num_names)
        text = plain(columns(rows, alignment, self.heads))
        return f"{self.title}\n{text}" if self.title else text

    def html(self) -> str:
        """Return the table as HTML with its title."""
        head = self._row("th", self.heads, escape)
        body = "".join(self._row("td", row, _cell) for row in self.rows)
        title = f"<h2>{escape(self.title)}</h2>" if self.title else ""
        return f'{title}<div class="wide"><table><thead>{head}</thead><tbody>{body}</tbody></table></div>'

    def _row(self, tag: str, cells: Iterable[str], shown: Callable[[str], str]) -> str:
        names = [" class=text" if i < self.num_names else "" for i, _ in enumerate(self.heads)]
        row = "".join(f"<{tag}{name}>{shown(cell)}</{tag}>" for name, cell in zip(names, cells, strict=True))
        return f"<tr>{row}</tr>"


@dataclass(frozen=True, slots=True)
class Report:
    """Plots and tables with their settings.

    Attributes:
        lead: a few sentences: of what, on what, with what; they stand below a picture as well.
        warnings: why its figures may mean little, or not what they seem to.
        notes: how it was measured.
        options: all settings by their names in code.
    """

    title: str
    lead: Sequence[str]
    plots: Sequence[Plot]
    tables: Sequence[Table] = ()
    warnings: Sequence[str] = ()
    notes: Sequence[str] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    def html(self) -> str:
        """Return a self-contained page."""
        figures = "".join(f"<figure>{_inline(plot)}</figure>" for plot in self.plots)
        shown = [(name.replace("_", " "), worded(name, value)) for name, value in self.options.items()]
        parts = [
            f"<h1>{escape(self.title)}</h1>",
            *(f"<p class=dim>{escape(sentence)}</p>" for sentence in self.lead),
            *(f"<p class=warn>{escape(warning)}</p>" for warning in self.warnings),
            f'<div class="plots">{figures}</div>',
            *(table.html() for table in self.tables),
            _list("How it was measured", self.notes),
            Table("Options", ("option", "value"), shown, 2).html() if shown else "",
            f"<p class=dim>ragcache {__version__}</p>",
        ]
        head = f"<meta charset=utf-8><meta name=viewport content='width=device-width'><style>{_STYLE}</style>"
        title = f"<!doctype html><html lang=en><head><title>{escape(self.title)}</title>"
        return f"{title}{head}</head><body>{''.join(parts)}</body></html>\n"

    def save(self, path: Path) -> None:
        """Write the page, or for ``.png`` and ``.svg`` the plots in two columns, below lead and warnings.

        The file is replaced whole.

        Raises:
            ConfigError: matplotlib is not installed. OSError: the file cannot be written.
        """
        from ragcache_core.reports.plots import beside

        make_folders(path.parent)
        picture = beside(self.title, self.plots, "\n".join((" ".join(self.lead), *self.warnings)))
        if path.suffix == ".png":
            picture.save_png(path)
            return
        with replacing(path) as file:
            file.write((self.html() if path.suffix == ".html" else picture.svg()).encode())

    def save_each(self, path: Path, names: Iterable[str]) -> list[Path]:
        """Write every plot as PNG beside ``path``, named by ``names``, and return the paths."""
        images = []
        for name, plot in zip(names, self.plots, strict=True):
            images.append(path.with_name(f"{path.stem}-{name}.png"))
            replace(plot, note=" ".join(self.lead)).save_png(images[-1])
        return images


def worded(name: str, value: Any) -> str:
    """Return an option's value as text, sizes in MiB."""
    if value is None:
        return "not given"
    if isinstance(value, list | tuple):
        return ", ".join(worded(name, each) for each in value) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and name.endswith("_bytes"):
        return f"{value / MIB:,.0f} MiB"
    return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)


def _list(title: str, sentences: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f"<h2>{escape(title)}</h2><ul>{items}</ul>" if sentences else ""


def _cell(text: str) -> str:
    figure, bracket, rest = text.partition(" [")
    return escape(figure) + (f" <small>[{escape(rest)}</small>" if bracket else "")


def _inline(plot: Plot) -> str:
    svg = plot.svg()
    return svg[svg.index("<svg") :]
