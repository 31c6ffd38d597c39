"""What two prompts must share to get the same answer."""

from __future__ import annotations

from typing import Any

import pytest

from ragcache_core.answers import QuestionKey, parse_question

ZOR = ("zor", "Zor is a city on the river Mel, and its council has nine members.")
MEL = ("mel", "Mel is a river that ends in the lake Tar.")
QUESTION = "Where is Zor?"


def chat(question: str = QUESTION, *documents: tuple[str, str], system: str = "Answer.") -> list[dict[str, Any]]:
    shown = "\n\n".join(text for _, text in documents or (ZOR, MEL))
    return [{"role": "system", "content": system}, {"role": "user", "content": f"{shown}\n\nQuestion: {question}"}]


def key_of(messages: list[dict[str, Any]], *queries: str, settings: str = "model") -> QuestionKey:
    return parse_question(messages, settings, [ZOR, MEL], queries or (QUESTION,))


def test_the_question_is_what_was_searched_for_and_all_else_is_the_key() -> None:
    one, other = key_of(chat()), key_of(chat("Where does Zor lie?"), "Where does Zor lie?")
    assert (one.question, other.question) == (QUESTION, "Where does Zor lie?")
    assert one.context_hash == other.context_hash
    assert [doc_id for doc_id, _ in one.documents] == ["zor", "mel"]


@pytest.mark.parametrize(
    "messages",
    [
        chat(QUESTION, ZOR),
        chat(QUESTION, MEL, ZOR),
        chat(QUESTION, ZOR, ("mel", MEL[1] + " It is long.")),
        chat(system="Answer in verse."),
        [*chat(), {"role": "assistant", "content": "By the Mel."}, {"role": "user", "content": QUESTION}],
        [{**chat()[0]}, {**chat()[1], "content": chat()[1]["content"] + "\nBe brief."}],
        [{**chat()[0]}, {**chat()[1], "name": "Ann"}],
    ],
    ids=["fewer", "another order", "another version", "instructions", "a conversation", "a suffix", "another field"],
)
def test_other_documents_versions_orders_and_instructions_are_another_key(messages: list[dict[str, Any]]) -> None:
    assert key_of(messages).context_hash != key_of(chat()).context_hash


def test_other_settings_numbers_and_question_words_are_another_key() -> None:
    assert key_of(chat(), settings="other").context_hash != key_of(chat()).context_hash
    then, now = "Who ruled Zor in 1850?", "Who ruled Zor in 1950?"
    assert key_of(chat(then), then).context_hash != key_of(chat(now), now).context_hash
    assert (
        key_of(chat("When was Zor?"), "When was Zor?").context_hash
        != key_of(chat("Where was Zor?"), "Where was Zor?").context_hash
    )


def test_a_question_is_not_taken_out_of_a_document_that_quotes_it() -> None:
    quoting = ("faq", f"People ask: {QUESTION} It is on the river Mel.")
    prompt = [{"role": "user", "content": f"Question: {QUESTION}\n\n{quoting[1]}"}]
    one = parse_question(prompt, "", [quoting], [QUESTION])
    assert one.question == QUESTION
    assert one.documents
    other = [{"role": "user", "content": f"Question: Where is it?\n\n{quoting[1]}"}]
    assert parse_question(other, "", [quoting], ["Where is it?", QUESTION]).context_hash == one.context_hash
