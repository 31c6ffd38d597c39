"""One reader per format: converts a file's bytes to text records.

A new format is one function here (or in a file of its own) and one line in ``READERS``.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ragcache_core.errors import DocumentError, EmptyDocumentError, UndecodableDocumentError
from ragcache_core.ingest.html import html_to_text
from ragcache_core.ingest.loaders import read_docx, read_pdf, read_rst
from ragcache_core.ingest.records import OnBad, Reader, Record, check_text, decode, is_unicode, title_of
from ragcache_core.ingest.source import FileLimits, SourceFile, processor_time, read_source
from ragcache_core.wire import MAX_DOC_ID_CHARS

_MAX_METADATA_CHARS = 1 << 16
_DELIMITERS = ",;\t|"
_CHARSET = re.compile(rb"""<meta[^>]*?charset\s*=\s*["']?\s*([A-Za-z0-9_.:-]+)""", re.IGNORECASE)
_CHARSET_BYTES = 1024  # a declaration behind them does not count, as in browsers
_WEB_CHARSETS = dict.fromkeys(("iso-8859-1", "latin1", "us-ascii", "ascii"), "cp1252")  # the WHATWG's standard
_SEP_LINE = re.compile(r'"?sep=([,;\t|])"?\n', re.IGNORECASE)
_END = "\0"  # a row of its own behind the last one, if no quote is open there
_CODE = (
    ".c", ".cc", ".cpp", ".cs", ".cu", ".go", ".h", ".hpp", ".java", ".jl", ".js", ".jsx", ".kt", ".lua", ".m", ".php",
    ".pl", ".py", ".pyi", ".r", ".rb", ".rs", ".scala", ".sh", ".sql", ".swift", ".ts", ".tsx",
)  # fmt: skip


def read_records(file: SourceFile, on_bad: OnBad, limits: FileLimits) -> Iterator[Record]:
    """Yield the records of one file; their ids begin with its name.

    Raises:
        DocumentError: what ``on_bad`` raises: the file is empty, binary, not UTF-8, damaged, encrypted, not readable,
            not JSON Lines, beyond the limits, or needs a library that is not installed.
    """
    name = file.name
    try:
        if len(name) > MAX_DOC_ID_CHARS - 16 or not is_unicode(name):
            raise UndecodableDocumentError(
                f"file {name!r:.120} has a name that is not UTF-8, or longer than {MAX_DOC_ID_CHARS - 16} characters: "
                "rename it"
            )
        content = read_source(file, limits.max_file_bytes)
        with processor_time(limits.max_file_s, name):
            records = list(READERS[file.path.suffix.lower()](content, name, on_bad))
        yield from records
    except DocumentError as error:
        on_bad(error)


def read_plain(content: bytes, name: str, _on_bad: OnBad) -> Iterator[Record]:
    """Yield a text file unchanged."""
    text = decode(content, name)
    yield Record(name, text, metadata={"source": name, "title": Path(name).stem})


def read_markdown(content: bytes, name: str, _on_bad: OnBad) -> Iterator[Record]:
    """Yield a Markdown file unchanged, with its first heading as the title."""
    text = decode(content, name)
    yield Record(name, text, is_markdown=True, metadata={"source": name, "title": title_of(text, name)})


def read_html(content: bytes, name: str, _on_bad: OnBad) -> Iterator[Record]:
    """Yield an HTML page's text with Markdown headings, without navigation, scripts and styles."""
    page = html_to_text(decode(_as_utf8(content, name), name))
    check_text(page.text, f"page {name!r}")
    title = title_of(page.text, name, page.title)
    yield Record(name, page.text, is_markdown=True, metadata={"source": name, "title": title})


def _as_utf8(content: bytes, name: str) -> bytes:
    """Return a page in UTF-8, converted from the charset that it declares."""
    declared = _CHARSET.search(content[:_CHARSET_BYTES])
    charset = declared[1].decode("ascii") if declared else "utf-8"
    try:
        codec = codecs.lookup(_WEB_CHARSETS.get(charset.lower(), charset))
        if codec.name == "utf-8" or content.startswith(codecs.BOM_UTF8):
            return content
        return codec.decode(content)[0].encode()
    except (LookupError, UnicodeError, TypeError, AttributeError) as error:
        raise UndecodableDocumentError(f"page {name!r} is not in its charset {charset!r}: save it in UTF-8") from error


def read_jsonl(content: bytes, name: str, on_bad: OnBad) -> Iterator[Record]:
    """Yield a record per line ``{"text": ..., "id": ..., "metadata": {...}}``; id and metadata are optional.

    A line without an id is ``name:LINE``. Blank lines are skipped; ``metadata`` may replace ``source`` and ``title``.
    """
    for number, line in enumerate(decode(content, name).split("\n"), start=1):
        if line.strip():
            try:
                yield _json_record(line, name, number)
            except DocumentError as error:
                on_bad(error)


def read_csv(content: bytes, name: str, _on_bad: OnBad) -> Iterator[Record]:
    """Yield a record ``name:LINE`` per row of a table: a line ``column: value`` for each value.

    The first row names the columns. The delimiter is the comma, semicolon, tab or bar that Excel's ``sep=`` line names,
    or that splits the first row into most columns. Quotes of a tab-separated table are text unless they enclose values.
    """
    text, first_line, delimiter = decode(content, name), 1, ""
    if named := _SEP_LINE.match(text):
        delimiter, text, first_line = named[1], text[named.end() :], 2
    delimiter = delimiter or max(_DELIMITERS, key=lambda each: _header_fit(text, each))
    try:
        rows = list(_rows(text, first_line, name, delimiter=delimiter, strict=delimiter == "\t"))
    except DocumentError:
        if delimiter != "\t":
            raise
        rows = list(_rows(text, first_line, name, delimiter=delimiter, quoting=csv.QUOTE_NONE))
    columns = [" ".join(column.split()) for column in rows[0][1]] if rows else []
    num_records = 0
    for line, row in rows[1:]:
        if values := {i: value.strip() for i, value in enumerate(row) if value.strip()}:
            names = (columns[i] if i < len(columns) and columns[i] else f"column {i + 1}" for i in values)
            shown = "\n".join(f"{column}: {value}" for column, value in zip(names, values.values(), strict=True))
            record_id = f"{name}:{line}"
            yield Record(record_id, shown, line, metadata={"source": name, "title": record_id})
            num_records += 1
    if not num_records:
        raise EmptyDocumentError(f"table {name!r} has no row below its first, which names the columns: add one")


def _header_fit(text: str, delimiter: str) -> tuple[bool, int]:
    """Return how well a delimiter splits the first row: no column begins with a space, then the number of columns."""
    with _any_field_size(text):
        row = next(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter), [])
    return len(row) > 1 and not any(column.startswith(" ") for column in row), len(row)


def _rows(text: str, first_line: int, name: str, **dialect: Any) -> Iterator[tuple[int, list[str]]]:
    """Yield the non-empty rows with the number of their first line.

    Raises:
        DocumentError: the text is not CSV of this dialect.
    """
    reader = csv.reader(io.StringIO(f"{text}\n{_END}", newline=""), **dialect)
    line = first_line
    with _any_field_size(text):
        try:
            for row in reader:
                if row == [_END]:
                    return
                if row and row[-1].endswith(_END):
                    raise csv.Error("a quote that begins in it has no end")
                if row:
                    yield line, row
                line = first_line + reader.line_num
        except csv.Error as error:
            raise DocumentError(f"line {line} of {name!r} is not CSV ({error}): correct it") from error


@contextmanager
def _any_field_size(text: str) -> Iterator[None]:
    """Raise the process's limit of 131,072 characters per CSV field to the length of the text."""
    before = csv.field_size_limit(max(csv.field_size_limit(), len(text) + 1))
    try:
        yield
    finally:
        csv.field_size_limit(before)


def read_code(content: bytes, name: str, _on_bad: OnBad) -> Iterator[Record]:
    """Yield source code unchanged; it is split best at the blank lines between definitions.

    A file without anything in it, as many an ``__init__.py``, is nothing bad: it has no record.
    """
    if content.strip():
        yield from read_plain(content, name, _on_bad)


READERS: Mapping[str, Reader] = {
    ".csv": read_csv,
    ".docx": read_docx,
    ".htm": read_html,
    ".html": read_html,
    ".jsonl": read_jsonl,
    ".md": read_markdown,
    ".pdf": read_pdf,
    ".rst": read_rst,
    ".tsv": read_csv,
    ".txt": read_plain,
    **dict.fromkeys(_CODE, read_code),
}


def _json_record(line: str, name: str, number: int) -> Record:
    form = 'write {"text": "...", "id": "...", "metadata": {...}} on one line'
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
    try:
        num_chars = len(json.dumps(metadata, allow_nan=False))
    except ValueError as error:  # NaN and infinity, which JSON has not
        raise DocumentError(
            f"line {number} of {name!r} has a number in 'metadata' that is not finite ({error}): write null"
        ) from error
    if num_chars > _MAX_METADATA_CHARS:
        raise DocumentError(
            f"line {number} of {name!r} has 'metadata' of {num_chars} characters, each chunk carries them and the "
            f"limit is {_MAX_METADATA_CHARS}: shorten them"
        )
    return Record(record_id, text, number, metadata={"source": name, "title": record_id, **metadata})
