"""The demo tokenizer: the training twin and the Hugging Face one agree, and any ASCII text survives."""

import string
from functools import cache
from typing import Any

import pytest

from examples.demo_model_training.export import MAX_NUM_TOKENS
from examples.demo_model_training.tokenizer import (
    ADDED_TOKENS,
    BOS_ID,
    TOOL_CALL_CLOSING,
    TOOL_CALL_OPENINGS,
    UNK,
    Vocabulary,
    huggingface_tokenizer,
)

TEXTS = (
    "Who founded Zorval?",
    "# Zorval\n\nZorval is a company. It was founded in 1875.",
    "Anna Brenk, Tolmar",
    "arbitrary Words, CamelCase and 1234567 - {json: [1, 2]} <tags>",
    string.printable,
    "unbekannt: äöü 你好",
    "",
)


@cache
def tokenizer() -> Any:
    return huggingface_tokenizer("{{ messages }}", MAX_NUM_TOKENS)


@pytest.mark.parametrize("text", TEXTS)
def test_training_vocabulary_and_hugging_face_tokenizer_give_the_same_ids(text: str) -> None:
    assert tokenizer()(text)["input_ids"] == [BOS_ID, *Vocabulary().encode(text)]


@pytest.mark.parametrize("text", TEXTS[:3])
def test_text_of_the_language_survives_a_round_trip(text: str) -> None:
    ids = Vocabulary().encode(text)
    plain = " ".join(text.split())
    assert Vocabulary().decode(ids) == plain
    assert tokenizer().decode(ids).strip() == plain


def test_printable_ascii_has_no_unknown_token() -> None:
    vocabulary = Vocabulary()
    assert vocabulary.ids[UNK] not in vocabulary.encode(string.printable)


def test_white_space_does_not_change_the_tokens() -> None:
    vocabulary = Vocabulary()
    assert vocabulary.encode("Document:  Zorval\n\nis a\tcompany .") == vocabulary.encode(
        "Document: Zorval is a company."
    )


def test_tokens_of_a_document_do_not_depend_on_its_neighbours() -> None:
    vocabulary = Vocabulary()
    first, second = "Zorval makes lamps.", "Document: Tolmar lies in Krenda"
    assert vocabulary.encode(first + " " + second) == vocabulary.encode(first) + vocabulary.encode(second)


def test_each_added_token_is_one_id() -> None:
    for token in ADDED_TOKENS:
        assert len(tokenizer()(token, add_special_tokens=False)["input_ids"]) == 1


def test_added_tokens_are_kept_when_special_tokens_are_skipped() -> None:
    text = f"{TOOL_CALL_OPENINGS['query']} Who founded Zorval? {TOOL_CALL_CLOSING}"
    ids = [*Vocabulary().encode(text), Vocabulary().ids["</s>"]]
    decoded = tokenizer().decode(ids, skip_special_tokens=True)
    assert decoded == '<tool_call>{"name": "search", "arguments": {"query": " Who founded Zorval? "}}</tool_call>'


def test_vocabulary_ids_lie_below_the_padded_size() -> None:
    vocabulary = Vocabulary()
    assert vocabulary.padded_size % 64 == 0
    assert max(vocabulary.ids.values()) < vocabulary.padded_size
