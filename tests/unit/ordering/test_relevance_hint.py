"""A line beside the question names the order of relevance where the documents stand in another one."""

from __future__ import annotations

import pytest

from ragcache_core.errors import ConfigError
from ragcache_core.prompt import PromptLayout
from ragcache_core.types import Document

A, B, C = (Document(name, f"Text of {name}.") for name in "abc")
LAYOUT = PromptLayout(relevance_hint="Most relevant first: {order}")


def shown(layout: PromptLayout, documents: list[Document], relevance: list[Document] | None) -> str:
    content: str = layout.messages(documents, "Who?", relevance=relevance)[-1]["content"]
    return content


def test_reordered_documents_are_named_by_their_number_before_the_question() -> None:
    assert shown(LAYOUT, [C, A, B], [A, B, C]).endswith("Text of b.\n\nMost relevant first: 2, 3, 1\n\nQuestion: Who?")


def test_what_stands_before_the_hint_is_the_same_with_and_without_it() -> None:
    with_hint, without = (shown(layout, [B, A], [A, B]) for layout in (LAYOUT, PromptLayout()))
    assert with_hint.startswith(without.removesuffix("Question: Who?"))


@pytest.mark.parametrize("hint", ["", "first", "{order} {order}"])
def test_a_hint_without_a_place_for_the_order_is_refused(hint: str) -> None:
    with pytest.raises(ConfigError, match="relevance_hint is"):
        PromptLayout(relevance_hint=hint)
