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


def test_documents_that_the_prompt_shows_with_their_id_are_named_by_it() -> None:
    layout = PromptLayout(document_format="[{doc_id}] {text}", relevance_hint="By relevance: {order}.")
    assert "\n\nBy relevance: a, b, c.\n\n" in shown(layout, [C, A, B], [A, B, C])


@pytest.mark.parametrize("relevance", [None, [], [A, B, C], [A, C], [C]])
def test_nothing_is_said_where_the_order_is_that_of_the_search(relevance: list[Document] | None) -> None:
    assert shown(LAYOUT, [A, B, C], relevance) == shown(PromptLayout(), [A, B, C], None)


def test_what_was_retrieved_but_is_not_shown_is_not_named() -> None:
    assert "first: 2, 1\n" in shown(LAYOUT, [B, A], [C, A, B])


def test_nothing_is_said_without_a_hint() -> None:
    assert shown(PromptLayout(), [B, A], [A, B]) == shown(PromptLayout(), [B, A], None)


def test_what_stands_before_the_hint_is_the_same_with_and_without_it() -> None:
    with_hint, without = (shown(layout, [B, A], [A, B]) for layout in (LAYOUT, PromptLayout()))
    assert with_hint.startswith(without.removesuffix("Question: Who?"))


@pytest.mark.parametrize("hint", ["", "first", "{order} {order}"])
def test_a_hint_without_a_place_for_the_order_is_refused(hint: str) -> None:
    with pytest.raises(ConfigError, match="relevance_hint is"):
        PromptLayout(relevance_hint=hint)
