"""The readers, one per format: bytes of a file in, records of text out.

A new format is one function here (or in a file of its own) and one line in ``READERS``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from ragcache_core.errors import DocumentError, UndecodableDocumentError
from ragcache_core.ingest.html import html_to_text
from ragcache_core.ingest.records import (
    OnBad,
    Reader,
    Record,
    check_text,
    decode,
    is_unicode,
    title_of,
)
from ragcache_core.ingest.source import MAX_FILE_BYTES, SourceFile, read_source
from ragcache_core.wire import MAX_DOC_ID_CHARS

_MAX_METADATA_CHARS = 1 << 16


def read_records(file: SourceFile, on_bad: OnBad, *, max_file_bytes: int = MAX_FILE_BYTES) -> Iterator[Record]:
    """Yield the records of one file; its name is the stem of their ids.

    Raises:
        DocumentError: what ``on_bad`` raises: the file is empty, binary, not UTF-8, not readable, not JSON Lines, too
            long.
    """
    name = file.name
    try:
        if len(name) > MAX_DOC_ID_CHARS - 16 or not is_unicode(name):
            raise UndecodableDocumentError(
                f"file {name!r:.120} has a name that is not UTF-8, or longer than {MAX_DOC_ID_CHARS - 16} characters: "
                "rename it"
            )
        yield from READERS[file.path.suffix.lower()](read_source(file, max_file_bytes), name, on_bad)
    except DocumentError as error:
        on_bad(error)


def read_plain(content: bytes, name: str, _on_bad: OnBad) -> Iterator[Record]:
    """Yield a text file as it is."""
    text = decode(content, name)
    yield Record(name, text, metadata={"source": name, "title": Path(name).stem})


def read_markdown(content: bytes, name: str, _on_bad: OnBad) -> Iterator[Record]:
    """Yield a Markdown file as it is, its first heading as the title."""
    text = decode(content, name)
    yield Record(name, text, is_markdown=True, metadata={"source": name, "title": title_of(text, name)})


def read_html(content: bytes, name: str, _on_bad: OnBad) -> Iterator[Record]:
    """Yield what an HTML page says, its headings as Markdown headings; navigation, scripts and styles are dropped."""
    page = html_to_text(decode(content, name))
    check_text(page.text, f"page {name!r}")
    title = title_of(page.text, name, page.title)
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
    check_text(text, f"line {number} of {name!r}")
    if not isinstance(record_id, str) or not 0 < len(record_id) <= MAX_DOC_ID_CHARS - 16 or not is_unicode(record_id):
        raise DocumentError(
            f"line {number} of {name!r} has 'id' {record_id!r:.60}, not a string of 1 to {MAX_DOC_ID_CHARS - 16} "
            f"characters: {form}"
        )
    if not isinstance(metadata, dict):
        raise DocumentError(f"line {number} of {name!r} has 'metadata' {metadata!r:.60}, not an object: {form}")
    if (num_chars := len(json.dumps(metadata))) > _MAX_METADATA_CHARS:
        raise DocumentError(
            f"line {number} of {name!r} has 'metadata' of {num_chars} characters, each chunk carries them and the limit "
            f"is {_MAX_METADATA_CHARS}: shorten them, or leave bad documents out (--skip-bad)"
        )
    return Record(record_id, text, number, metadata={"source": name, "title": record_id, **metadata})
