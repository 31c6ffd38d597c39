"""Documents named by their texts: their tokens are found in a prompt, whatever its tokenizer does with white space."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.recognition import PromptTexts
from tests.support.local_tokenizer import LocalTokenizer

DEMO = LocalTokenizer.of_model(str(Path(__file__).parents[3] / "examples" / "demo_model"))
BYTES = LocalTokenizer.of_bytes("")
WORDS = st.lists(st.sampled_from(["zor", "mel", "a", "Ünna", "12", "\n", "  ", "."]), min_size=1, max_size=9)
TEXTS = WORDS.map("".join).filter(str.strip)


def find(texts: PromptTexts, prompt: Sequence[int], shown: Sequence[str]) -> list[tuple[int, int] | None]:
    return texts.find(prompt, [(text, 0) for text in shown])


def tokens(tokenizer: LocalTokenizer, text: str) -> tuple[int, ...]:
    return tokenizer.encode(text).token_ids


@pytest.mark.parametrize("tokenizer", [DEMO, BYTES], ids=["wordpiece", "bytes"])
@given(texts=st.lists(TEXTS.map(lambda text: f"{text.strip()} is a document of more than a word"), max_size=4))
def test_every_text_is_found_in_its_own_tokens(tokenizer: LocalTokenizer, texts: list[str]) -> None:
    prompt = tokens(tokenizer, "Answer.\n\n" + "\n\n".join(texts) + "\n\nQuestion: Who?")
    places = find(tokenizer._texts, prompt, texts)
    ends = 0
    for text, place in zip(texts, places, strict=True):
        assert place is not None
        start, end = place
        assert ends <= start < end <= len(prompt)
        ends = end
        shown = tokenizer.decode(prompt[start:end])
        assert "".join(shown.split()) == "".join(tokenizer.decode(tokens(tokenizer, text)).split())


@given(st.lists(st.integers(0, 255), max_size=60), st.lists(st.text(max_size=12), max_size=4))
def test_places_never_overlap_and_lie_in_the_prompt(prompt: list[int], texts: list[str]) -> None:
    places = [place for place in find(BYTES._texts, prompt, texts) if place is not None]
    assert all(0 <= start < end <= len(prompt) for start, end in places)
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(places))


def test_what_a_prompt_does_not_show_has_no_place_and_what_comes_after_is_found() -> None:
    prompt = tokens(BYTES, "one document\n\nanother document")
    assert find(BYTES._texts, prompt, ["not there at all", "another document"]) == [None, (14, 30)]


def test_other_occurrences_of_a_text_are_passed_over() -> None:
    prompt = tokens(BYTES, "I know him. It says: no. no, he says")
    assert BYTES._texts.find(prompt, [("no", 2), ("he", 0)]) == [(25, 27), (29, 31)]
    assert BYTES._texts.find(prompt, [("no", 3), ("he", 0)]) == [None, (29, 31)]


def test_a_text_that_a_template_shows_as_json_is_found() -> None:
    prompt = tokens(BYTES, r'["a \"quoted\" word\nand é"]')
    assert find(BYTES._texts, prompt, ['a "quoted" word\nand é']) == [(2, len(prompt) - 2)]


def test_a_tokenizer_without_bytes_finds_the_tokens_of_a_text_but_for_its_edges() -> None:
    ids = {text: i for i, text in enumerate(["one", "two", "three", "four", "five", "six", "seven", "eight", "merged"])}

    def encode(text: str) -> Sequence[int]:
        return [ids[word] for word in text.split()]

    texts = PromptTexts(None, encode)
    prompt = [*encode("eight one two three four five"), ids["merged"], *encode("one two three four five six eight")]
    assert find(texts, prompt, ["one two three four five six"] * 2) == [(1, 6), (7, 13)]


def test_texts_that_a_prompt_does_not_show_cost_no_more_than_the_prompt() -> None:
    encoded: list[int] = []

    def encode(text: str) -> list[int]:
        encoded.append(len(text))
        return [200, 201, 202]

    prompt = list(range(100))
    for token_bytes in (None, [b"x"] * 256):
        encoded.clear()
        texts = PromptTexts(token_bytes, encode)
        assert texts.find(prompt, [("not there " * 20, 0)] * 4096) == [None] * 4096
        assert sum(encoded) <= 16 * len(prompt)
        assert texts.find(prompt, [("x", 4096)] * 3) == [None] * 3
