"""Files that would take for ever: what is read takes time by its length, and what is no file is not waited for."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ragcache_core.errors import DocumentError
from ragcache_core.ingest import FileLimits, find_files, read_documents
from ragcache_core.ingest.html import html_to_text

NUM_CHARS = 100_000
BUDGET_S = 2.0  # of processor time; the slowest take 0.25 s
FRAGMENTS = [
    *("a", " ", "\n", "\t", "\r", "\u200d", "é", ".", '"', "'", "\\", ",", ";"),
    *("# ", "#", "- ", "> ", "1. ", "*", "_", "`", "```\n", "|", "[", "](", "![", "===\n", ":", "$", "~~"),
    *("<", ">", "<!", "<!--", "-->", "</", "<a", "<a b='", "=", "/>", "&", "&#", "9", "<br>", "<div>", "</div>"),
    *("<p>", "<b>", "</b>", "<li>", "<pre>", "<td>", "<nav>", "</nav>", "<svg/>", "<head>", "<title>", "<script>"),
]


def hostile(*fragments: str) -> str:
    return ("".join(fragments) * NUM_CHARS)[:NUM_CHARS]


def seconds_for(path: Path) -> float:
    started_s = time.process_time()
    for _ in read_documents(find_files([path]).files, on_bad=lambda _: None):
        pass
    return time.process_time() - started_s


@pytest.mark.slow
@given(
    suffix=st.sampled_from([".html", ".md", ".txt"]),
    begin=st.sampled_from(["", *FRAGMENTS]),
    fragments=st.lists(st.sampled_from(FRAGMENTS), min_size=1, max_size=4),
    end=st.sampled_from(["", "x", ">", "<br>", "\n\nx"]),
)
@example(suffix=".md", begin="# a", fragments=[" "], end="x")
@example(suffix=".html", begin="", fragments=["a", "<br>"], end="")
@example(suffix=".html", begin="", fragments=["<div>"], end="")
@example(suffix=".html", begin="", fragments=["<b>", "<p>", "</b>"], end="")
@example(suffix=".html", begin="", fragments=["<!"], end="")
@example(suffix=".html", begin="<pre>", fragments=[" "], end="x")
@example(suffix=".txt", begin="", fragments=["\u200d"], end="")
@settings(
    deadline=None, max_examples=150, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_no_text_of_a_hundred_kilobytes_takes_long(
    tmp_path: Path, suffix: str, begin: str, fragments: list[str], end: str
) -> None:
    path = tmp_path / f"a{suffix}"
    path.write_text(begin + hostile(*fragments) + end, encoding="utf-8")
    assert seconds_for(path) < BUDGET_S


@pytest.mark.slow
@pytest.mark.parametrize(("suffix", "begin", "fragment"), [(".html", "", "a<br>"), (".md", "", "a"), (".txt", "", "a")])
def test_a_file_four_times_as_long_takes_about_four_times_as_long(
    tmp_path: Path, suffix: str, begin: str, fragment: str
) -> None:
    """Not sixteen times: a text without any seam was quadratic in the splitter."""
    path = tmp_path / f"a{suffix}"
    seconds = []
    for num_chars in (400_000, 1_600_000):
        path.write_text(begin + fragment * (num_chars // len(fragment)))
        seconds.append(seconds_for(path))
    assert seconds[1] < 8 * seconds[0]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["pipe", "link to a pipe", "link to a device"])
def test_what_is_no_regular_file_is_refused_and_not_waited_for(tmp_path: Path, kind: str) -> None:
    (tmp_path / "notes").mkdir()
    path = tmp_path / "notes" / "x.txt"
    if kind == "link to a device":
        path.symlink_to("/dev/zero")
    else:
        os.mkfifo(path if kind == "pipe" else tmp_path / "notes" / "pipe")
        if kind != "pipe":
            path.symlink_to("pipe")
    message = "'x.txt' is a link to '/dev/zero'" if "device" in kind else "'x.txt' is a named pipe, not a regular file"
    with pytest.raises(DocumentError, match=message):
        list(read_documents(find_files([tmp_path / "notes"]).files))
    with pytest.raises(DocumentError, match="is a device" if "device" in kind else "is a named pipe"):
        list(read_documents(find_files([path]).files))  # named itself, a link may lead anywhere: to regular files


def test_a_link_out_of_the_folder_is_refused_and_one_within_it_is_followed(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "notes" / "a.txt").write_text("a")
    (tmp_path / "notes" / "b.txt").symlink_to("a.txt")
    (tmp_path / "notes" / "c.txt").symlink_to("../secret.txt")
    (tmp_path / "notes" / "d.txt").symlink_to("nothing")
    (tmp_path / "notes" / "e.txt").symlink_to("e.txt")
    refused: list[DocumentError] = []
    documents = list(read_documents(find_files([tmp_path / "notes"]).files, on_bad=refused.append))
    assert [d.text for d in documents] == ["a", "a"]
    outside, missing, loop = map(str, refused)
    assert "'c.txt' is a link to" in outside
    assert "outside" in outside
    assert "'d.txt' cannot be read (No such file" in missing
    assert "'e.txt' cannot be read (Too many levels" in loop
    (named,) = read_documents(find_files([tmp_path / "notes" / "c.txt"]).files)
    assert named.text == "secret"


def test_a_file_beyond_the_limit_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / "a.txt").open("wb") as file:
        file.truncate(1 << 40)  # sparse: it takes no room, and could not be read
    with pytest.raises(DocumentError, match=r"'a.txt' has 1099511627776 bytes, the limit is 67108864: raise"):
        list(read_documents(find_files([tmp_path]).files))
    (tmp_path / "a.txt").write_text("1234567")
    assert len(list(read_documents(find_files([tmp_path]).files, limits=FileLimits(max_file_bytes=7)))) == 1
    with pytest.raises(DocumentError, match="has 7 bytes, the limit is 6"):
        list(read_documents(find_files([tmp_path]).files, limits=FileLimits(max_file_bytes=6)))


@pytest.mark.parametrize(
    ("html", "title", "text"),
    [
        ("<title>A</title>b<svg><title>c</title></svg>", "A", "b"),
        ("<head><title>A</title><p>b", "A", "b"),  # the head's own end may be left out
        ("<head><title>A &amp;\n B</title></head><body>c", "A & B", "c"),
        ("a<script>if (1 < 2) '<p>'</script>b</script>c", "", "abc"),
        ("a<div><nav>b</div>c", "", "a\n\nc"),
        ("a<nav/>b", "", "ab"),
        ("<a href='>'>a</a> < b <= c", "", "a < b <= c"),
        ("a<!-- <p> b -->c<!-->d<!x>e<?f?>g</3>h", "", "acdegh"),
        ("a<!-- b", "", "a"),
        ("a<p b='c", "", "a"),
        ("a &lt;b&gt; &#99999999999999999999; " + "&#" + "9" * 5_000, "", "a <b> \ufffd \ufffd"),
        ("<ul><li>a<li>b<ul><li>c</ul></ul>d", "", "- a\n- b\n\n- c\n\nd"),
        ("<h2></h2>a<br><br><br>b<hr>c", "", "a\n\nb\n\nc"),
        ("<table><tr><td>a<td>b<tr><td>c", "", "a b\nc"),
        ("<pre>  a\n   b  \n</pre>c  d", "", "a\n   b\n\nc d"),
        ("<P>A<b>B</B> c</P>", "", "AB c"),
    ],
)
def test_a_page_is_read_as_browsers_do(html: str, title: str, text: str) -> None:
    page = html_to_text(html)
    assert (page.title, page.text) == (title, text)
