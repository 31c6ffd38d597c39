from __future__ import annotations

from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

from ragcache_core.ingest import Splitting
from ragcache_core.ingest.token_counter import TokenCounter
from ragcache_core.prompt import PromptLayout, render_chat
from ragcache_core.types import Document, SegmentKind
from tests.support.local_tokenizer import LocalTokenizer

WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=400)
MARKDOWN = st.lists(
    st.sampled_from(["# Zor", "## Rivers", "The river Mel ends. It is long.", "- a", "äöü 日本 🙂", "```\nx = 1\n```"]),
    max_size=30,
).map("\n\n".join)  # fmt: skip


MODEL = Path(__file__).parents[3] / "examples" / "demo_model"
TOKENIZER = LocalTokenizer.of_model(str(MODEL))
COUNTER = TokenCounter(MODEL)


def without_white_space(text: str) -> str:
    return "".join(text.split())


@given(text=WORDS | MARKDOWN, max_chars=st.integers(1, 60), is_markdown=st.booleans())
@example(text="00\x1f", max_chars=1, is_markdown=False)  # white space to Python, not to the splitter
@settings(deadline=None)
def test_chunks_lose_no_words_keep_their_order_and_their_limit(text: str, max_chars: int, is_markdown: bool) -> None:
    chunks = Splitting(max_chars).split(text, is_markdown=is_markdown)
    assert without_white_space("".join(chunks)) == without_white_space(text)
    assert all(0 < len(chunk) <= max_chars and chunk in text for chunk in chunks)
    assert all(chunk == chunk.strip() for chunk in chunks)


@given(text=WORDS | MARKDOWN, num_tokens=st.integers(32, 60), is_markdown=st.booleans())
@example(text="Say </s> twice: </s>. " * 20, num_tokens=32, is_markdown=False)
@example(text="# A\n\n" + "Zor is a city. " * 40, num_tokens=32, is_markdown=True)
@settings(deadline=None)
def test_chunks_by_tokens_lose_no_words_and_keep_their_limit(text: str, num_tokens: int, is_markdown: bool) -> None:
    chunks = Splitting(num_tokens, length=COUNTER.num_tokens).split(text, is_markdown=is_markdown)
    assert without_white_space("".join(chunks)) == without_white_space(text)
    assert all(COUNTER.num_tokens(chunk) <= num_tokens for chunk in chunks)


def test_a_chunk_has_as_many_tokens_in_a_prompt_as_it_was_cut_by() -> None:
    text = "Zor </s> is a city on the river Mel. " * 60
    chunks = Splitting(64, length=COUNTER.num_tokens).split(text)
    documents = [Document(f"zor#{i}", chunk) for i, chunk in enumerate(chunks)]
    layout = PromptLayout()
    shown = [(d.doc_id, d.text) for d in documents]
    prompt = render_chat(TOKENIZER, layout.messages(documents, "Where is Zor?"), shown)
    found = [(s.text_end or s.end) - s.start for s in prompt.segments if s.kind is SegmentKind.DOCUMENT]
    assert found == [COUNTER.num_tokens(chunk) for chunk in chunks]
    assert max(found) <= 64


@given(num_words=st.integers(1, 80), line=st.integers(1, 9), max_chars=st.integers(20, 90), overlap=st.integers(0, 19))
@example(num_words=29, line=7, max_chars=39, overlap=7)  # the space in front of the last chunk is one too many
@settings(deadline=None)
def test_overlapping_chunks_leave_nothing_between_them(num_words: int, line: int, max_chars: int, overlap: int) -> None:
    words = [f"word{i:03}" for i in range(num_words)]
    text = "\n\n".join(" ".join(words[i : i + line]) for i in range(0, num_words, line))
    end = 0
    for chunk in Splitting(max_chars, overlap=overlap).split(text, is_markdown=True):
        start = text.index(chunk)  # every word is in the text once
        assert not text[end:start].strip()
        assert end - start <= overlap
        end = start + len(chunk)
    assert end == len(text)


def test_sections_that_fit_are_chunks_with_their_headings() -> None:
    sections = ["## Zor\n\n" + "Zor is a city. " * 5, "## Mel\n\n" + "Mel is a river. " * 5]
    chunks = Splitting(120).split("\n\n".join(sections), is_markdown=True)
    assert chunks == [section.strip() for section in sections]


def test_the_heading_of_a_long_section_stays_with_the_sections_beginning() -> None:
    chunks = Splitting(100).split("# Guide\n\n## Zor\n\n" + "Zor is a city on the river. " * 20, is_markdown=True)
    assert chunks[0].startswith("# Guide\n\n## Zor\n\nZor is a city")
    assert max(map(len, chunks)) <= 100
