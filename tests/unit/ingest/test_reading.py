from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ragcache_core.errors import DocumentError, DuplicateDocumentError, EmptyDocumentError, UndecodableDocumentError
from ragcache_core.ingest import Splitting, find_files, read_documents
from ragcache_core.types import Document


def write(root: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return root


def read(root: Path, **options: object) -> list[Document]:
    return list(read_documents(find_files([root]).files, **options))  # type: ignore[arg-type]


def test_directories_are_read_in_sorted_order_without_hidden_and_unknown_files(tmp_path: Path) -> None:
    write(tmp_path, {"b.txt": "b", "a/z.md": "z", "a/B.TXT": "B", ".git/x.txt": "x", ".hidden.md": "h", "c.png": b"\0"})
    found = find_files([tmp_path])
    assert [file.name for file in found.files] == ["b.txt", "a/B.TXT", "a/z.md"]
    assert found.num_skipped == 1


def test_links_to_directories_are_not_followed(tmp_path: Path) -> None:
    write(tmp_path, {"a/zor.txt": "Zor"})
    (tmp_path / "a" / "loop").symlink_to(tmp_path)
    assert [d.doc_id for d in read(tmp_path)] == ["a/zor.txt"]


@pytest.mark.parametrize(
    ("name", "message"),
    [("missing", "nothing is at"), ("empty", r"holds no document \(0 other files\)"), ("c.png", "suffix '.png'")],
)
def test_a_path_without_documents_is_refused(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    write(tmp_path, {"c.png": b"\0"})
    with pytest.raises(DocumentError, match=message):
        find_files([tmp_path / name])


def test_ids_and_metadata_of_whole_files_and_of_chunks(tmp_path: Path) -> None:
    write(tmp_path, {"guide/zor.md": "# The city of Zor\n\nShort.", "long.txt": "word " * 30})
    documents = read(tmp_path, splitting=Splitting(100))
    assert [d.doc_id for d in documents] == ["long.txt#0", "long.txt#1", "guide/zor.md"]
    assert documents[1].metadata == {"source": "long.txt", "title": "long", "chunk": 1}
    assert documents[2].metadata == {"source": "guide/zor.md", "title": "The city of Zor", "chunk": 0}
    assert documents[2].text == "# The city of Zor\n\nShort."


def test_a_byte_order_mark_and_foreign_line_ends_are_tolerated(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": b"\xef\xbb\xbfone\r\ntwo\rthree"})
    assert read(tmp_path)[0].text == "one\ntwo\nthree"


def test_html_keeps_what_the_page_says_and_its_headings(tmp_path: Path) -> None:
    page = """<!doctype html><html><head><title>The  page</title><style>p {color: red}</style></head><body>
    <nav><a href="/">Home</a></nav><script>var hidden = 1;</script><!-- a comment -->
    <h1>City of <em>Zor</em></h1><p>Zor is a <b>large</b>
      city.<br>It has <i>one</i>&nbsp;river.</p>
    <ul><li>Mel</li><li><p>Tar</p></li></ul><table><tr><th>name</th><td>Zor</td></tr></table>
    <pre>x = 1
        y = 2</pre></body></html>"""
    write(tmp_path, {"zor.html": page})
    (document,) = read(tmp_path)
    assert document.metadata["title"] == "The page"
    assert document.text.split("\n") == [
        "# City of Zor", "", "Zor is a large city.", "It has one river.", "", "- Mel", "", "- Tar", "", "name Zor", "",
        "x = 1", "        y = 2",
    ]  # fmt: skip


def test_json_lines_keep_id_and_metadata_and_may_leave_them_out(tmp_path: Path) -> None:
    lines = [{"text": "one", "id": "faq-1", "metadata": {"lang": "en", "source": "https://a"}}, {"text": "two"}]
    write(tmp_path, {"faq.jsonl": "\n\n".join(map(json.dumps, lines)) + '\n{"id": 7, "text": "three"}\n'})
    one, two, three = read(tmp_path)
    assert one == Document("faq-1", "one", {"source": "https://a", "title": "faq-1", "lang": "en", "chunk": 0})
    assert (two.doc_id, two.metadata["source"]) == ("faq.jsonl:3", "faq.jsonl")
    assert three.doc_id == "7"


BAD_FILES: list[tuple[str, str | bytes, type[DocumentError], str]] = [
    ("a.txt", b"", EmptyDocumentError, "'a.txt' holds 0 characters"),
    ("a.md", " \n\n ", EmptyDocumentError, "'a.md' holds 4 characters"),
    ("a.html", "<html><script>x</script></html>", EmptyDocumentError, "page 'a.html' holds 0 characters"),
    ("a.jsonl", "", EmptyDocumentError, "'a.jsonl' holds 0 characters"),
    ("a.txt", b"abc\0def", UndecodableDocumentError, "'a.txt' is binary .byte 0x00 at offset 3.: save"),
    ("a.txt", b"abc\xe4def", UndecodableDocumentError, "'a.txt' is not UTF-8 .byte 0xe4 at offset 3.: save"),
    ("a.txt", b"\xef\xbb\xbfabc\xe4", UndecodableDocumentError, "offset 6"),
    ("a.txt", "Zor".encode("utf-16"), UndecodableDocumentError, "'a.txt' is UTF-16"),
    ("a.html", b"<p>\xe4</p>", UndecodableDocumentError, "offset 3"),
    ("a.html", "<p>a&#xD800;</p><p>&#0;b", DocumentError, ""),
    ("a.jsonl", '{"text": "a"}\n{"text": ', DocumentError, "line 2 of 'a.jsonl' is not JSON .*write"),
    ("a.jsonl", "[" * 100_000, DocumentError, "line 1 of 'a.jsonl' is not JSON"),
    ("a.jsonl", "[1]", DocumentError, "line 1 of 'a.jsonl' is a JSON list, not an object"),
    ("a.jsonl", '{"id": "x"}', DocumentError, "line 1 of 'a.jsonl' has 'text' None, not a string"),
    ("a.jsonl", '{"text": " "}', EmptyDocumentError, "line 1 of 'a.jsonl' holds 1 characters"),
    ("a.jsonl", '{"text": "\\ud800"}', UndecodableDocumentError, "half a surrogate pair"),
    ("a.jsonl", '{"text": "a\\u0000"}', UndecodableDocumentError, "NUL"),
    ("a.jsonl", '{"text": "a", "id": ""}', DocumentError, "'id' '', not a string of 1 to"),
    ("a.jsonl", '{"text": "a", "id": true}', DocumentError, "'id' True"),
    ("a.jsonl", '{"text": "a", "metadata": 3}', DocumentError, "'metadata' 3, not an object"),
    ("a.jsonl", '{"text": "a", "id": "x"}\n{"text": "b", "id": "x"}', DuplicateDocumentError,
     "'x' is in .*a.jsonl:1 and again in .*a.jsonl:2"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "error", "message"), BAD_FILES)
def test_a_bad_document_stops_the_reading_and_reports_why(
    tmp_path: Path, name: str, content: str | bytes, error: type[DocumentError], message: str
) -> None:
    write(tmp_path, {name: content})
    if not message:  # characters HTML may not name are replaced by the parser: they never reach a document
        assert not {"\0", "\ud800"} & set(read(tmp_path)[0].text)
        return
    with pytest.raises(error, match=message) as caught:
        read(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_without_permission_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": "a"})
    (tmp_path / "a.txt").chmod(0)
    with pytest.raises(DocumentError, match="check its permissions"):
        read(tmp_path)


def test_bad_documents_can_be_skipped_one_by_one(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": b"\xff", "b.jsonl": '{"text": "b"}\nbroken\n{"text": "c"}', "c.txt": "", "d.txt": "d"})
    skipped: list[DocumentError] = []
    documents = read(tmp_path, on_bad=skipped.append)
    assert [d.doc_id for d in documents] == ["b.jsonl:1", "b.jsonl:3", "d.txt"]
    assert [type(error) for error in skipped] == [UndecodableDocumentError, DocumentError, EmptyDocumentError]


def test_the_same_name_in_two_directories_is_a_duplicate(tmp_path: Path) -> None:
    write(tmp_path, {"one/a.txt": "a", "two/a.txt": "b"})
    files = find_files([tmp_path / "one", tmp_path / "two"]).files
    with pytest.raises(DuplicateDocumentError, match=r"'a.txt' is in .*one/a.txt and again in .*two/a.txt"):
        list(read_documents(files))


def test_a_page_that_is_nested_three_thousand_deep_is_read(tmp_path: Path) -> None:
    write(tmp_path, {"deep.html": "<div>" * 3_000 + "Zor" + "</div>" * 3_000})
    assert read(tmp_path)[0].text == "Zor"
