"""Texts before splitting, and checks for every reader."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ragcache_core.errors import DocumentError, EmptyDocumentError, UndecodableDocumentError
from ragcache_core.types import DocId

_BOM = b"\xef\xbb\xbf"
_HINT = "save it as text in UTF-8"
_HEADING = re.compile(r" {0,3}#{1,6}[ \t]+(.+)")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_MAX_TITLE_CHARS = 200  # each chunk carries it


@dataclass(frozen=True, slots=True)
class Record:
    """A text before it is split: a whole file, or a line of a JSON Lines file.

    ``record_id`` becomes the id of its document, or the stem of its chunks' ids. ``line`` counts from 1.
    """

    record_id: DocId
    text: str
    line: int | None = None
    is_markdown: bool = False
    metadata: Mapping[str, object] = field(default_factory=dict)


OnBad = Callable[[DocumentError], None]
"""Called with the error of an invalid document; raises to stop, returns to skip it."""

Reader = Callable[[bytes, str, OnBad], Iterator[Record]]
"""(content, name, on_bad) -> records."""


def decode(content: bytes, name: str) -> str:
    """Return the text of a UTF-8 file without byte order mark, with ``\n`` line ends.

    Raises:
        EmptyDocumentError: it holds nothing but white space.
        UndecodableDocumentError: it is binary, or not UTF-8; the message has the offset of the first bad byte.
    """
    body = content.removeprefix(_BOM)
    num_skipped = len(content) - len(body)
    if content[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise UndecodableDocumentError(f"file {name!r} is UTF-16: {_HINT}")
    if (nul := body.find(0)) >= 0:
        raise UndecodableDocumentError(f"file {name!r} is binary (byte 0x00 at offset {nul + num_skipped}): {_HINT}")
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        at = f"byte 0x{body[error.start]:02x} at offset {error.start + num_skipped}"
        raise UndecodableDocumentError(f"file {name!r} is not UTF-8 ({at}): {_HINT}") from error
    check_text(text, f"file {name!r}")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def check_text(text: str, what: str) -> None:
    """Reject a text that is none.

    Raises:
        EmptyDocumentError, UndecodableDocumentError
    """
    if not text.strip():
        raise EmptyDocumentError(f"{what} holds {len(text)} characters, none of them text: write something into it")
    if "\0" in text or not is_unicode(text):
        raise UndecodableDocumentError(f"{what} holds NUL or half a surrogate pair, which is not text: {_HINT}")


def is_unicode(text: str) -> bool:
    """Return whether ``text`` can be saved as UTF-8, which lone surrogates cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def title_of(text: str, name: str, title: str = "") -> str:
    """Return ``title``, or the first Markdown heading, or the file's name, shortened."""
    lines = (heading[1] for line in _outside_code(text) if (heading := _HEADING.match(line)))
    headings = (line.rstrip(" \t").rstrip("#").rstrip(" \t") for line in lines)
    return (title or next(filter(None, headings), "") or Path(name).stem)[:_MAX_TITLE_CHARS]


def _outside_code(text: str) -> Iterator[str]:
    """Yield the lines of a Markdown text that are not in a fenced code block."""
    fence = ""
    for line in text.split("\n"):
        found = _FENCE.match(line)
        if fence:
            if found and found[1].startswith(fence) and not line.strip(" `~"):
                fence = ""
        elif found:
            fence = found[1]
        else:
            yield line
