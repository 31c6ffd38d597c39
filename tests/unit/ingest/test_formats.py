"""Formats that need a library, tables and source code."""

from __future__ import annotations

import contextlib
import csv
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

import docx
import pytest
from docx.oxml import parse_xml
from pypdf import PdfWriter
from pypdf.generic import DecodedStreamObject, DictionaryObject, NameObject

from ragcache_core.errors import DocumentError, EmptyDocumentError, UndecodableDocumentError
from ragcache_core.ingest import FileLimits, Splitting, find_files, read_documents
from ragcache_core.types import Document


def read(root: Path, **options: object) -> list[Document]:
    return list(read_documents(find_files([root]).files, **options))  # type: ignore[arg-type]


def write_pdf(path: Path, *pages: str, password: str | None = None, owner_password: str | None = None) -> None:
    writer = PdfWriter()
    font = {"/Type": "/Font", "/Subtype": "/Type1", "/BaseFont": "/Helvetica"}
    fonts = DictionaryObject(
        {NameObject("/F1"): DictionaryObject({NameObject(k): NameObject(v) for k, v in font.items()})}
    )
    for text in pages:
        page = writer.add_blank_page(612, 792)
        page[NameObject("/Resources")] = DictionaryObject({NameObject("/Font"): fonts})
        content = DecodedStreamObject()
        content.set_data(f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET".encode())
        page[NameObject("/Contents")] = content
    writer.add_metadata({"/Title": "The  guide"})
    if password is not None:
        writer.encrypt(password, owner_password, algorithm="AES-256")
    writer.write(path)


def write_docx(path: Path) -> None:
    document = docx.Document()
    document.add_heading("Zor", level=1)
    document.add_paragraph("Zor is a city.")
    document.add_heading("Rivers", level=2)
    document.add_paragraph("Mel", style="List Bullet")
    table = document.add_table(rows=2, cols=3)
    for row, texts in zip(table.rows, (["name", "a", "b"], ["Zor", "1", "2"]), strict=True):
        for cell, text in zip(row.cells, texts, strict=True):
            cell.text = text
    table.cell(0, 1).merge(table.cell(0, 2))
    document.save(str(path))


def test_a_pdf_file_is_its_pages(tmp_path: Path) -> None:
    write_pdf(tmp_path / "a.pdf", "Zor is a city.", "Mel is a river.")
    (document,) = read(tmp_path)
    assert document.text == "Zor is a city.\n\nMel is a river."
    assert document.metadata == {"source": "a.pdf", "title": "The guide", "chunk": 0}


def test_a_word_document_keeps_headings_lists_and_tables(tmp_path: Path) -> None:
    write_docx(tmp_path / "a.docx")
    (document,) = read(tmp_path)
    assert document.text.split("\n\n") == [
        "# Zor", "Zor is a city.", "## Rivers", "- Mel", "name | a b\nZor | 1 | 2",
    ]  # fmt: skip
    assert document.metadata["title"] == "Zor"


def test_an_empty_cell_of_a_word_table_keeps_its_place(tmp_path: Path) -> None:
    document = docx.Document()
    table = document.add_table(rows=3, cols=3)
    for row, texts in zip(table.rows, (["", "2025", "2026"], ["Zor", "", "7"], ["", "", ""]), strict=True):
        for cell, text in zip(row.cells, texts, strict=True):
            cell.text = text
    document.save(str(tmp_path / "a.docx"))
    assert read(tmp_path)[0].text == "| 2025 | 2026\nZor |  | 7"


def test_restructured_text_keeps_headings_and_what_only_sphinx_knows(tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("the secret")
    (tmp_path / "a.rst").write_text(
        "Zor\n===\n\nZor is a *large* city, see :func:`mel`.\n\n.. note:: It rains.\n\n.. function:: mel(x)\n\n"
        "   Return the river.\n\n.. include:: secret.txt\n\n.. code-block:: python\n\n   x = 1\n\n"
        "Rivers\n------\n\n- Mel\n"
    )
    document = next(d for d in read(tmp_path) if d.doc_id == "a.rst")
    assert document.metadata["title"] == "Zor"
    lines = document.text.split("\n")
    assert lines[0] == "# Zor"
    assert "Zor is a large city, see :func:`mel`." in lines
    assert {".. function:: mel(x)", "   Return the river.", "It rains.", "x = 1", "## Rivers", "- Mel"} <= set(lines)
    assert "the secret" not in document.text


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_a_row_of_a_table_is_a_document_that_names_its_columns(tmp_path: Path, delimiter: str) -> None:
    rows = [["name", "kind", "says"], ["Zor", "city", '"a\nb"'], [""] * 3, ["Mel", "", "c", "more"]]
    (tmp_path / "a.csv").write_text("\n".join(delimiter.join(row) for row in rows))
    zor, mel = read(tmp_path)
    assert zor == Document(
        "a.csv:2", "name: Zor\nkind: city\nsays: a\nb", {"source": "a.csv", "title": "a.csv:2", "chunk": 0}
    )
    assert (mel.doc_id, mel.text) == ("a.csv:5", "name: Mel\nsays: c\ncolumn 4: more")


def test_source_code_is_cut_between_definitions_and_empty_files_are_nothing_bad(tmp_path: Path) -> None:
    bodies = [f"def river_{i}():\n    # it is long\n\n    return {i}" for i in range(9)]
    (tmp_path / "a.py").write_text("\n\n\n".join(bodies) + "\n")
    (tmp_path / "__init__.py").write_text("\n")
    documents = read(tmp_path, splitting=Splitting(120))
    assert "\n\n\n".join(d.text for d in documents) == "\n\n\n".join(bodies)
    assert all(d.text.startswith("def ") for d in documents)
    assert len(documents) > 4


def damaged_zip() -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("word/document.xml", b"<w:document/>")
    return packed.getvalue()


BAD: list[tuple[str, bytes, str]] = [
    ("a.pdf", b"", "'a.pdf' is damaged, pypdf cannot read it .EmptyFileError"),
    ("a.pdf", b"%PDF-1.7\n" + b"\xff" * 100, "'a.pdf' is damaged"),
    ("a.docx", b"no archive", "'a.docx' is damaged, python-docx cannot read it .BadZipFile"),
    ("a.docx", damaged_zip(), "'a.docx' is damaged"),
    ("a.docx", b"\xd0\xcf\x11\xe0" + bytes(100), "'a.docx' is encrypted, or of an older Word"),
    ("a.rst", b"\xff\xff", "'a.rst' is not UTF-8"),
    ("a.rst", b"* " * 5_000, "'a.rst' is damaged, docutils cannot read it .RecursionError"),
]


@pytest.mark.parametrize(("name", "content", "message"), BAD)
def test_a_damaged_file_is_reported_by_its_name_and_can_be_left_out(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    (tmp_path / "b.txt").write_text("b")
    with pytest.raises(UndecodableDocumentError, match=message) as caught:
        read(tmp_path)
    assert "\n" not in str(caught.value)
    assert [d.doc_id for d in read(tmp_path, on_bad=lambda _: None)] == ["b.txt"]


def test_a_pdf_file_with_a_password_or_without_text_is_reported(tmp_path: Path) -> None:
    write_pdf(tmp_path / "a.pdf", "Zor", password="secret")
    with pytest.raises(UndecodableDocumentError, match=r"'a.pdf' is encrypted: save it without a password"):
        read(tmp_path)
    write_pdf(tmp_path / "a.pdf", "", "")
    with pytest.raises(EmptyDocumentError, match="'a.pdf' has 2 pages without text"):
        read(tmp_path)


def test_every_truncation_of_a_file_is_read_or_told(tmp_path: Path) -> None:
    write_pdf(tmp_path / "a.pdf", "Zor is a city.")
    write_docx(tmp_path / "a.docx")
    for path in (tmp_path / "a.pdf", tmp_path / "a.docx"):
        content = path.read_bytes()
        for end in range(0, len(content), max(len(content) // 40, 1)):
            path.write_bytes(content[:end])
            told: list[DocumentError] = []
            documents = list(read_documents(find_files([path]).files, on_bad=told.append))
            assert len(documents) + len(told) == 1
            assert all("Zor" in d.text for d in documents)


def test_a_table_without_rows_and_a_field_without_end_are_reported(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("name,kind\n")
    with pytest.raises(EmptyDocumentError, match="'a.csv' has no row below its first"):
        read(tmp_path)
    (tmp_path / "a.csv").write_text('name\nb\n"' + "c" * 200_000)
    with pytest.raises(DocumentError, match="line 3 of 'a.csv' is not CSV"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("name", "table", "expected"),
    [
        ("sep.csv", "sep=;\r\nname;price\r\nchair;12,50\r\n", {"sep.csv:3": "name: chair\nprice: 12,50"}),
        (
            "header.csv",
            '"name\nof it";"price, net, in EUR"\n"chair";"12"\n',
            {"header.csv:3": "name of it: chair\nprice, net, in EUR: 12"},
        ),
        (
            "commas.csv",
            "name, colour;price\nchair, red;12,50\n",
            {"commas.csv:2": "name, colour: chair, red\nprice: 12,50"},
        ),
        ("spaces.csv", "name, price\nchair, 12\n", {"spaces.csv:2": "name: chair\nprice: 12"}),
        (
            "stray.tsv",
            'name\tnote\n"alpha\tone\n"beta\ttwo\n',
            {"stray.tsv:2": 'name: "alpha\nnote: one', "stray.tsv:3": 'name: "beta\nnote: two'},
        ),
        ("quoted.tsv", 'name\tnote\n"a\tb"\t"one\ntwo"\n', {"quoted.tsv:2": "name: a\tb\nnote: one\ntwo"}),
    ],
)
def test_tables_of_spreadsheets_and_databases_are_read(
    tmp_path: Path, name: str, table: str, expected: dict[str, str]
) -> None:
    (tmp_path / name).write_text(table, newline="")
    assert {document.doc_id: document.text for document in read(tmp_path)} == expected


def test_a_field_of_any_length_is_read_and_the_limit_of_the_process_stays(tmp_path: Path) -> None:
    limit = csv.field_size_limit()
    (tmp_path / "a.csv").write_text('id,text\n1,"' + "word " * 30_000 + '"\n2,short\n')
    documents = read(tmp_path)
    assert sum(len(document.text) for document in documents) > 140_000
    assert documents[-1].text == "id: 2\ntext: short"
    assert csv.field_size_limit() == limit


@pytest.mark.parametrize("charset", ["windows-1251", "koi8-r", "utf-8"])
def test_a_page_is_read_in_the_charset_that_it_declares(tmp_path: Path, charset: str) -> None:
    page = f'<html><head><meta charset="{charset}"><title>Река</title></head><body><p>Мель'
    (tmp_path / "a.html").write_bytes(page.encode(charset))
    (document,) = read(tmp_path)
    assert (document.text, document.metadata["title"]) == ("Мель", "Река")
    (tmp_path / "a.html").write_bytes(b'<meta charset="nonsense">text')
    with pytest.raises(UndecodableDocumentError):
        read(tmp_path)


def test_a_comment_in_a_code_block_is_no_title(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("```python\n# a comment\n```\n\n# Zor\n\nA city.\n")
    (document,) = read(tmp_path)
    assert document.metadata["title"] == "Zor"


@pytest.mark.parametrize("rows", ['1,2\n"open,3\n4,5', '1,2\n"open,3\n4,5\n', '1,2\n3,"open\n', '1,2\n3,"'])
def test_an_unclosed_quote_is_reported_by_its_line_and_not_read_to_the_end(tmp_path: Path, rows: str) -> None:
    (tmp_path / "a.csv").write_text(f"a,b\n{rows}")
    with pytest.raises(DocumentError, match=r"line 3 of 'a.csv' is not CSV .a quote that begins in it has no end"):
        read(tmp_path)


def test_a_file_that_takes_too_long_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(_page: object) -> Iterator[str]:
        while True:
            with contextlib.suppress(Exception):  # as libraries do
                sum(range(100_000))

    write_pdf(tmp_path / "a.pdf", "Zor")
    (tmp_path / "b.txt").write_text("b")
    monkeypatch.setattr("pypdf.PageObject.extract_text", never)
    told: list[DocumentError] = []
    documents = read(tmp_path, on_bad=told.append, limits=FileLimits(max_file_s=0.3))
    assert [d.doc_id for d in documents] == ["b.txt"]
    assert "'a.pdf' takes more than 0.3 processor seconds to read: raise" in str(told[0])


WORD = "xmlns:w='http://schemas.openxmlformats.org/wordprocessingml/2006/main'"
CHANGES = [
    ("ins", "w:t", "is "), ("del", "w:delText", "was "), ("moveFrom", "w:t", "here "), ("moveTo", "w:t", "a city"),
]  # fmt: skip
RUN = "<w:r><w:t>{}</w:t></w:r>"
FIELD = f"<w:sdt {WORD}><w:sdtPr/><w:sdtContent>{{}}</w:sdtContent></w:sdt>"


def test_fields_of_a_form_and_tracked_changes_of_a_word_document_are_read_as_they_are_shown(tmp_path: Path) -> None:
    document = docx.Document()
    document.add_table(rows=1, cols=1).cell(0, 0).text = "in a row"
    (table,) = document.element.body.xpath("w:tbl")
    table.append(parse_xml(FIELD.format(f"<w:tr><w:tc><w:p>{RUN.format('in a field')}</w:p></w:tc></w:tr>")))
    table.addprevious(parse_xml(FIELD.format(FIELD.format(f"<w:p>{RUN.format('block field')}</w:p>"))))
    paragraph = document.add_paragraph("Zor ")._p
    for change, tag, text in CHANGES:
        run = RUN.format(text).replace("w:t>", f"{tag}>").replace(f"<{tag}", f"<{tag} xml:space='preserve'")
        paragraph.append(parse_xml(f"<w:{change} {WORD}>{run}</w:{change}>"))
    document.save(str(tmp_path / "a.docx"))
    assert read(tmp_path)[0].text == "block field\n\nin a row\nin a field\n\nZor is a city"
