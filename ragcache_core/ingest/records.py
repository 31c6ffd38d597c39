"""The readers, one per format: bytes of a file in, records of text out.

A new format is one function here (or in a file of its own) and one line in ``READERS``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ragcache_core.errors import DocumentError, EmptyDocumentError, UndecodableDocumentError
from ragcache_core.ingest.html import html_to_text
from ragcache_core.types import DocId
from ragcache_core.wire import MAX_DOC_ID_CHARS

_BOM = b"\xef\xbb\xbf"
_CURE = "save it as text in UTF-8, or leave bad documents out (--skip-bad)"
_HEADING = re.compile(r"^ {0,3}#{1,6}[ \t]+(.+?)[ \t]*#*[ \t]*$", re.MULTILINE)


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
"""Is told of a document that cannot be stored: raises to stop, returns to go on without it."""

Reader = Callable[[bytes, str, OnBad], Iterator[Record]]
"""(content, name, on_bad) -> records."""


def read_records(path: Path, name: str, on_bad: OnBad) -> Iterator[Record]:
    """Yield the records of one file; ``name`` is the stem of their ids.

    Raises:
        DocumentError: what ``on_bad`` raises: the file is empty, binary, not UTF-8, not readable, not JSON Lines.
    """
    try:
        if len(name) > MAX_DOC_ID_CHARS - 16 or not _is_unicode(name):
            raise UndecodableDocumentError(
                f"file {name!r:.120} has a name that is not UTF-8, or longer than {MAX_DOC_ID_CHARS - 16} characters: "
                "rename it"
            )
        try:
            content = path.read_bytes()
        except OSError as error:
            raise DocumentError(f"file {name!r} cannot be read ({error.strerror}): check its permissions") from error
        yield from READERS[path.suffix.lower()](content, name, on_bad)
    except DocumentError as error:
        on_bad(error)


def read_plain(content: bytes, name: str, _on_bad: OnBad) -> Iterator[Record]:
    """Yield a text file as it is."""
    text = decode(content, name)
    yield Record(name, text, metadata={"source": name, "title": Path(name).stem})


def read_markdown(content: bytes, name: str, _on_bad: OnBad) -> Iterator[Record]:
    """Yield a Markdown file as it is, its first heading as the title."""
    text = decode(content, name)
    yield Record(name, text, is_markdown=True, metadata={"source": name, "title": _title(text, name)})


def read_html(content: bytes, name: str, _on_bad: OnBad) -> Iterator[Record]:
    """Yield what an HTML page says, its headings as Markdown headings; navigation, scripts and styles are dropped."""
    page = html_to_text(decode(content, name))
    _check_text(page.text, f"page {name!r}")
    title = page.title or _title(page.text, name)
    yield Record(name, page.text, is_markdown=True, metadata={"source": name, "title": title})


def read_jsonl(content: bytes, name: str, on_bad: OnBad) -> Iterator[Record]:
    """Yield a record per line ``{"text": ..., "id": ..., "metadata": {...}}``; id and metadata may be left out.

    A line without an id is ``name:LINE``. Blank lines are skipped; ``metadata`` may replace ``source`` and ``title``.
    """
    for number, line in enumerate(decode(content, name).split("\n"), start=1):
        if line.strip():
            try:
                yield _json_record(line, name, number)
            except DocumentError as error:
                on_bad(error)


READERS: Mapping[str, Reader] = {
    ".htm": read_html,
    ".html": read_html,
    ".jsonl": read_jsonl,
    ".md": read_markdown,
    ".txt": read_plain,
}


def decode(content: bytes, name: str) -> str:
    """Return the text of a UTF-8 file, without a byte order mark and with ``\\n`` at the ends of lines.

    Raises:
        EmptyDocumentError: it holds nothing but white space.
        UndecodableDocumentError: it is binary, or not UTF-8; the message has the offset of the first bad byte.
    """
    body = content.removeprefix(_BOM)
    num_skipped = len(content) - len(body)
    if content[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise UndecodableDocumentError(f"file {name!r} is UTF-16: {_CURE}")
    if (nul := body.find(0)) >= 0:
        raise UndecodableDocumentError(f"file {name!r} is binary (byte 0x00 at offset {nul + num_skipped}): {_CURE}")
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        at = f"byte 0x{body[error.start]:02x} at offset {error.start + num_skipped}"
        raise UndecodableDocumentError(f"file {name!r} is not UTF-8 ({at}): {_CURE}") from error
    _check_text(text, f"file {name!r}")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _check_text(text: str, what: str) -> None:
    if not text.strip():
        raise EmptyDocumentError(
            f"{what} holds {len(text)} characters, none of them text: write something into it, or leave bad "
            "documents out (--skip-bad)"
        )
    if "\0" in text or not _is_unicode(text):
        raise UndecodableDocumentError(f"{what} holds NUL or half a surrogate pair, which is not text: {_CURE}")


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _title(text: str, name: str) -> str:
    heading = _HEADING.search(text)
    return heading[1] if heading else Path(name).stem


def _json_record(line: str, name: str, number: int) -> Record:
    form = 'write {"text": "...", "id": "...", "metadata": {...}} on one line, or leave bad documents out (--skip-bad)'
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DocumentError(f"line {number} of {name!r} is not JSON ({error}): {form}") from error
    if not isinstance(data, dict):
        raise DocumentError(f"line {number} of {name!r} is a JSON {type(data).__name__}, not an object: {form}")
    text, record_id, metadata = data.get("text"), data.get("id", f"{name}:{number}"), data.get("metadata", {})
    if isinstance(record_id, int) and not isinstance(record_id, bool):
        record_id = str(record_id)
    if not isinstance(text, str):
        raise DocumentError(f"line {number} of {name!r} has 'text' {text!r:.60}, not a string: {form}")
    _check_text(text, f"line {number} of {name!r}")
    if not isinstance(record_id, str) or not 0 < len(record_id) <= MAX_DOC_ID_CHARS - 16 or not _is_unicode(record_id):
        raise DocumentError(
            f"line {number} of {name!r} has 'id' {record_id!r:.60}, not a string of 1 to {MAX_DOC_ID_CHARS - 16} "
            f"characters: {form}"
        )
    if not isinstance(metadata, dict):
        raise DocumentError(f"line {number} of {name!r} has 'metadata' {metadata!r:.60}, not an object: {form}")
    return Record(record_id, text, number, metadata={"source": name, "title": record_id, **metadata})
