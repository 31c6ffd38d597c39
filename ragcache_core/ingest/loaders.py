"""Readers of PDF, DOCX and reStructuredText, by libraries of the extra ``loaders``."""

from __future__ import annotations

import io
import logging
import zipfile
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeVar

from ragcache_core.errors import DocumentError, EmptyDocumentError, UndecodableDocumentError
from ragcache_core.ingest.html import Page, html_to_text
from ragcache_core.ingest.records import OnBad, Record, check_text, decode, title_of

if TYPE_CHECKING:
    from docx.document import Document as WordDocument
    from docx.table import _Cell
    from docx.text.paragraph import Paragraph

_T = TypeVar("_T")
_MAX_UNPACKED_BYTES = 1 << 30
"""Of a Word document, which is an archive: some kilobytes can become any number of them."""
_WRAPPERS = ("sdtContent", "sdt", "customXml", "fldSimple", "ins", "moveTo", "smartTag")
_OLE = b"\xd0\xcf\x11\xe0"


def read_pdf(content: bytes, name: str, _on_bad: OnBad) -> Iterator[Record]:
    """Yield the text of a PDF file, page by page with a blank line between them."""
    pages, title = _loaded("pypdf", _pdf, content, name)
    text = "\n\n".join(filter(None, (page.strip() for page in pages)))
    if not text:
        raise EmptyDocumentError(
            f"file {name!r} has {len(pages)} pages without text: recognise the characters in its pictures (OCR)"
        )
    yield _record(name, text, title, is_markdown=False)


def read_docx(content: bytes, name: str, _on_bad: OnBad) -> Iterator[Record]:
    """Yield the text of a Word document, its headings as Markdown headings, a table's rows as lines."""
    text, title = _loaded("python-docx", _docx, content, name)
    yield _record(name, text, title, is_markdown=True)


def read_rst(content: bytes, name: str, _on_bad: OnBad) -> Iterator[Record]:
    """Yield the text of a reStructuredText file, its headings as Markdown headings.

    Directives and roles that docutils does not know (Sphinx has many) stay as they are written; no file is included.
    """
    page = _loaded("docutils", _rst, decode(content, name), name)
    yield _record(name, page.text, page.title, is_markdown=True)


def _loaded(library: str, load: Callable[[Any, str], _T], content: object, name: str) -> _T:
    """Return a library's result for a file; any exception means that the file is damaged.

    Raises:
        DocumentError: the library is not there, the file is encrypted, or :class:`UndecodableDocumentError`.
    """
    try:
        return load(content, name)
    except DocumentError:
        raise
    except ImportError as error:
        raise DocumentError(
            f"file {name!r} needs {library}, which is not installed: pip install 'ragcache[loaders]'"
        ) from error
    except Exception as error:
        said = f"{type(error).__name__}: {str(error).partition(chr(10))[0]:.100}".removesuffix(": ")
        raise UndecodableDocumentError(
            f"file {name!r} is damaged, {library} cannot read it ({said}): save it again"
        ) from error


def _record(name: str, text: str, title: str, *, is_markdown: bool) -> Record:
    text, title = (_unicode(part.replace("\0", "")) for part in (text, title))
    check_text(text, f"file {name!r}")
    shown = title_of(text if is_markdown else "", name, " ".join(title.split()))
    return Record(name, text, is_markdown=is_markdown, metadata={"source": name, "title": shown})


def _unicode(text: str) -> str:
    """Return text with surrogate pairs joined, and lone surrogates replaced."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _pdf(content: bytes, name: str) -> tuple[list[str], str]:
    from pypdf import PdfReader

    logging.getLogger("pypdf").setLevel(logging.ERROR)  # it warns of every oddity that it can live with
    reader = PdfReader(io.BytesIO(content))
    if reader.is_encrypted and not reader.decrypt(""):
        raise UndecodableDocumentError(f"file {name!r} is encrypted: save it without a password")
    pages = [page.extract_text() for page in reader.pages]
    return pages, (reader.metadata.title or "") if reader.metadata else ""


def _docx(content: bytes, name: str) -> tuple[str, str]:
    from docx import Document

    if content.startswith(_OLE):
        raise UndecodableDocumentError(
            f"file {name!r} is encrypted, or of an older Word: save it as .docx without a password"
        )
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        num_bytes = sum(entry.file_size for entry in archive.infolist())
    if num_bytes > _MAX_UNPACKED_BYTES:
        raise DocumentError(
            f"file {name!r} unpacks to {num_bytes} bytes, the limit is {_MAX_UNPACKED_BYTES}: save it without pictures"
        )
    document = Document(io.BytesIO(content))
    _unwrap(document)
    return "\n\n".join(_blocks(document)), document.core_properties.title


def _unwrap(document: WordDocument) -> None:
    """Unwrap elements that python-docx skips, such as form fields and tracked insertions."""
    body = document.element.body
    for moved in body.xpath(".//w:moveFrom"):
        moved.getparent().remove(moved)
    for wrapper in body.xpath("|".join(f".//w:{name}" for name in _WRAPPERS)):
        for child in list(wrapper):
            wrapper.addprevious(child)
        wrapper.getparent().remove(wrapper)


def _blocks(container: WordDocument | _Cell) -> Iterator[str]:
    from docx.text.paragraph import Paragraph

    for block in container.iter_inner_content():
        if isinstance(block, Paragraph):
            if text := block.text.strip():
                yield _mark(block) + text
        else:
            cells = ([cell for _, (cell, *_) in groupby(row.cells, lambda cell: cell._tc)] for row in block.rows)
            rows = (" | ".join(" ".join(_blocks(cell)) for cell in row) for row in cells)  # merged cells come once
            yield "\n".join(row.strip() for row in rows if row.strip(" |"))  # empty cells keep their places


def _mark(paragraph: Paragraph) -> str:
    style = ((paragraph.style and paragraph.style.name) or "").lower()
    if style.startswith("heading ") and style[8:].isdecimal():
        return "#" * min(int(style[8:]), 6) + " "
    return "# " if style == "title" else "- " if style.startswith("list") else ""


def _rst(text: str, _name: str) -> Page:
    from docutils import nodes
    from docutils.core import publish_doctree, publish_from_doctree

    settings = {
        "_disable_config": True,
        "embed_stylesheet": False,
        "file_insertion_enabled": False,
        "halt_level": 5,
        "line_length_limit": 1 << 20,
        "math_output": "LaTeX",
        "raw_enabled": False,
        "report_level": 5,
        "stylesheet_path": "",
        "traceback": True,
    }
    tree = publish_doctree(text, settings_overrides=settings)
    for message in list(tree.findall(nodes.system_message)):
        # What an error is about is in no other place: the whole of a directive that docutils does not know.
        about = [node for node in message.children if isinstance(node, nodes.literal_block) and message["level"] >= 3]
        message.parent.replace(message, about)
    return html_to_text(publish_from_doctree(tree, writer="html5", settings_overrides=settings).decode())
