"""The demo tokenizer: the training twin and the Hugging Face one agree, and any ASCII text survives."""

import string
from functools import cache
from typing import Any

import pytest

from examples.demo_model_training.export import MAX_NUM_TOKENS
from examples.demo_model_training.tokenizer import (
    BOS_ID,
    TOOL_CALL_CLOSING,
    TOOL_CALL_OPENINGS,
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


def test_added_tokens_are_kept_when_special_tokens_are_skipped() -> None:
    text = f"{TOOL_CALL_OPENINGS['query']} Who founded Zorval? {TOOL_CALL_CLOSING}"
    ids = [*Vocabulary().encode(text), Vocabulary().ids["</s>"]]
    decoded = tokenizer().decode(ids, skip_special_tokens=True)
    assert decoded == '<tool_call>{"name": "search", "arguments": {"query": " Who founded Zorval? "}}</tool_call>'
