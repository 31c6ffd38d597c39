"""What an HTML page says, as Markdown-like text: headings keep their ``#``, list items their ``-``."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bs4 import Tag

_DROPPED = ["head", "nav", "noscript", "script", "style", "svg", "template"]
_HEADINGS = ["h1", "h2", "h3", "h4", "h5", "h6"]
_BLOCKS = [
    "address", "article", "aside", "blockquote", "dd", "div", "dl", "dt", "fieldset", "figure", "footer", "form",
    "header", "hr", "main", "ol", "p", "pre", "section", "table", "ul",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Page:
    """The title of a page (may be empty) and its text."""

    title: str
    text: str


def html_to_text(html: str) -> Page:
    """Return title and text of a page, without navigation, scripts and styles."""
    from bs4 import BeautifulSoup, MarkupResemblesLocatorWarning, XMLParsedAsHTMLWarning
    from bs4.element import NavigableString

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MarkupResemblesLocatorWarning)
        warnings.simplefilter("ignore", XMLParsedAsHTMLWarning)
        soup = BeautifulSoup(html, "html.parser")
    title = _collapse(soup.title.get_text()).strip() if soup.title else ""
    for tag in soup.find_all(_DROPPED):
        tag.decompose()
    preformatted = {id(string) for pre in soup.find_all("pre") for string in pre.find_all(string=True)}
    for string in soup.find_all(string=True):
        if type(string) is NavigableString and id(string) not in preformatted:
            string.replace_with(_collapse(string))
    for tag in soup.find_all("br"):
        tag.replace_with("\n")
    for level, name in enumerate(_HEADINGS, start=1):
        for tag in soup.find_all(name):
            _surround(tag, f"\n\n{'#' * level} ", "\n\n")
    for tag in soup.find_all(_BLOCKS):
        _surround(tag, "\n\n", "\n\n")
    for tag in soup.find_all("li"):
        _surround(tag, "\n- ", "\n")
    for tag in soup.find_all("tr"):
        _surround(tag, "\n", "\n")
    for tag in soup.find_all(["td", "th"]):
        _surround(tag, "", " ")
    return Page(title, _tidy(soup.get_text()))


def _surround(tag: Tag, before: str, after: str) -> None:
    tag.insert(0, before)
    tag.append(after)


def _collapse(text: str) -> str:
    return re.sub(r"\s+", " ", text)


def _tidy(text: str) -> str:
    text = re.sub(r"\n- \s+(?![-\s])", "\n- ", text)
    text = re.sub(r"[ \t]+\n", "\n", text)
    text = re.sub(r"\n (?=\S)", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()
