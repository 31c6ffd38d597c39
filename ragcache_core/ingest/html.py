"""Convert an HTML page to Markdown-like text: headings keep ``#``, list items ``-``.

Read from front to back, once, as the HTML standard cuts a page into tags and text: no page takes longer than its length
explains. Trees of elements, and parsers that look again for what they did not find, are quadratic in hostile pages.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from html import unescape
from sys import intern

_TAG = re.compile(
    r"""<(?P<slash>/?)(?P<name>[a-zA-Z][^\s/>]*+)
        (?:[^>=]++ | =\s*+(?>"[^"]*+(?:"|\Z) | '[^']*+(?:'|\Z) | [^\s>]*+))*+
        (?:>|\Z)""",
    re.VERBOSE,
)
"""A tag with its attributes, to the end of the page if it is not closed. It always matches and never tries again."""
_COMMENT_END = re.compile(r"--!?>")
_NO_TAG = re.compile(r"<[!?/][^>]*+>?")
"""A document type, a processing instruction, ``</3>``."""
_HUGE_REFERENCE = re.compile(r"&#(?:[0-9]{8,}|[xX][0-9a-fA-F]{7,});?")
"""Of a character that there is not; ``int`` refuses some of them."""

_DROPPED = {"head", "nav", "noscript", "script", "style", "svg", "template"}
_VOID = {
    "area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr",
}  # fmt: skip
_IN_HEAD = {"base", "link", "meta", "noscript", "script", "style", "template", "title"}
_TEXT_ONLY = {
    name: re.compile(rf"</{name}(?=[\s/>])", re.IGNORECASE) for name in ("script", "style", "textarea", "title")
}
"""Elements that contain no tags, and their end tags."""
_PARAGRAPHS = {
    "address", "article", "aside", "blockquote", "dd", "div", "dl", "dt", "fieldset", "figure", "footer", "form",
    "h1", "h2", "h3", "h4", "h5", "h6", "header", "hr", "main", "ol", "p", "pre", "section", "table", "ul",
}  # fmt: skip
_LINES = {"li", "tr"}
_CELLS = {"td", "th"}
_MARKS = {"li": "- "} | {f"h{level}": "#" * level + " " for level in range(1, 7)}


@dataclass(frozen=True, slots=True)
class Page:
    """The title of a page (may be empty) and its text."""

    title: str
    text: str


def html_to_text(html: str) -> Page:
    """Return title and text of a page, without navigation, scripts and styles, in linear time."""
    html = _HUGE_REFERENCE.sub("\ufffd", html)
    reader = _Reader()
    at = 0
    while (start := html.find("<", at)) >= 0:
        reader.read_text(html[at:start])
        if tag := _TAG.match(html, start):
            name = intern(tag["name"].lower())
            at = tag.end()
            if tag["slash"]:
                reader.end(name)
            elif html.endswith("/>", start, at):
                reader.start_and_end(name)
            else:
                reader.start(name)
                if end_tag := _TEXT_ONLY.get(name):
                    end = end_tag.search(html, at)
                    text_end = end.start() if end else len(html)
                    reader.read_text(html[at:text_end])
                    at = text_end
        elif html.startswith("<!--", start):
            end = _COMMENT_END.search(html, start + 2)  # "<!-->" is a whole comment
            at = end.end() if end else len(html)
        elif other := _NO_TAG.match(html, start):
            at = other.end()
        else:
            reader.read_text("<")
            at = start + 1
    reader.read_text(html[at:])
    return reader.page()


class _Reader:
    """Converts the tags and text of a page to lines."""

    def __init__(self) -> None:
        self._title = ""
        self._written: list[str] = []
        self._num_breaks = 0  # line ends before what comes next
        self._needs_space = False
        self._mark = ""  # of the heading or list item that begins
        self._cell_has_text = self._ends_paragraph = False  # of the table's cell that is open
        self._open: list[str] = []
        self._num_open: Counter[str] = Counter()
        self._num_dropped = 0  # of those that are open

    def start(self, name: str) -> None:
        if self._num_open["head"] and name not in _IN_HEAD and name != "head":
            self.end("head")  # its own end tag may be left out
        self._break(name)
        self._mark = _MARKS.get(name, self._mark)
        if name not in _VOID:
            self._open.append(name)
            self._num_open[name] += 1
            self._num_dropped += name in _DROPPED

    def end(self, name: str) -> None:
        """Close the innermost element with this name and its children; without one close nothing."""
        while self._num_open[name]:
            closed = self._open.pop()
            self._num_open[closed] -= 1
            self._num_dropped -= closed in _DROPPED
            self._break(closed)
            if closed == name:
                return
        self._break(name)

    def start_and_end(self, name: str) -> None:
        self.start(name)
        if name not in _VOID:
            self.end(name)

    def read_text(self, text: str) -> None:
        within = self._open[-1] if self._open else ""
        if within == "title":
            if not self._num_open["svg"]:
                self._title = self._title or unescape(text)
            return
        if within == "head" and text.strip():
            self.end("head")
        if self._num_dropped:
            return
        text = unescape(text)
        if self._num_open["pre"] and text:
            self._write(text)
            return
        words = " ".join(text.split())
        self._needs_space |= text[:1].isspace()
        if words:
            self._write(words)
            self._needs_space = text[-1:].isspace()

    def page(self) -> Page:
        lines = (line.rstrip() for line in "".join(self._written).split("\n"))
        text = re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()
        return Page(" ".join(self._title.split()), text)

    def _break(self, name: str) -> None:
        if self._num_dropped:
            return
        if name == "br":
            self._num_breaks = min(self._num_breaks + 1, 2)
        elif name == "p" and (self._num_open["td"] or self._num_open["th"]):
            self._ends_paragraph = True  # which counts within a cell, not between cells: a row stays a line
        elif name in _PARAGRAPHS:
            self._num_breaks = 2
        elif name in _LINES:
            self._num_breaks = max(self._num_breaks, 1)
        elif name in _CELLS:
            self._needs_space = True
            self._cell_has_text = self._ends_paragraph = False
        if name in _MARKS:
            self._mark = ""  # nothing was written behind it

    def _write(self, text: str) -> None:
        if self._ends_paragraph and self._cell_has_text:
            self._num_breaks = 2
        self._cell_has_text, self._ends_paragraph = True, False
        if self._num_breaks:
            self._written.append("\n" * self._num_breaks)
        elif self._needs_space:
            self._written.append(" ")
        self._written.append(self._mark + text)
        self._num_breaks, self._needs_space, self._mark = 0, False, ""
