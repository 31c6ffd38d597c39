"""Documents that a conversation shows already are referred to."""

from __future__ import annotations

import pytest

from ragcache_core.client.prompts.repeated_documents import reference_to, without_repeats

ZOR = (
    "Zor is a lighthouse in the north of Mel, kept by Anna Krenvi since 1823, and painted white every spring. Ships "
    "sound their horns at it."
)
MEL = "Mel is an island whose people make clocks, fish for herring, and speak a language with eleven cases."
DOCUMENTS = [("zor", ZOR), ("mel", MEL)]


def user(text: str) -> dict[str, object]:
    return {"role": "user", "content": text}


ANSWER = {"role": "assistant", "content": "Anna."}


def test_a_document_is_shown_once_and_referred_to_afterwards() -> None:
    told = [user(f"{ZOR}\n\nWho keeps it?"), ANSWER, user(f"{MEL}\n\n{ZOR}\n\nWhere is it?")]
    first, answer, second = without_repeats(told, DOCUMENTS)
    assert (first, answer) == (told[0], ANSWER)
    assert second["content"] == f"{MEL}\n\n{reference_to(ZOR)}\n\nWhere is it?"
    assert reference_to(ZOR) == '[shown above: "Zor is a lighthouse in the north of ..."]'


def test_the_prompt_of_a_turn_begins_with_that_of_the_turn_before() -> None:
    told = [user(f"{ZOR}\n\nOne?"), ANSWER, user(f"{ZOR}\n\nTwo?"), ANSWER, user(f"{MEL}\n\n{ZOR}\n\nThree?")]
    for end in (1, 3):
        assert without_repeats(told[:end], DOCUMENTS) == without_repeats(told, DOCUMENTS)[:end]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": f"It says: {ZOR}"},
        {"role": "user", "content": "Nothing of it."},
        {"role": "user", "content": None},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}, "text"]},
    ],
    ids=["the assistant quotes", "not shown", "empty", "no text"],
)
def test_what_shows_no_document_stays_as_it_is(message: dict[str, object]) -> None:
    assert without_repeats([user(ZOR), message], DOCUMENTS) == [user(ZOR), message]


def test_a_question_that_quotes_a_document_keeps_it() -> None:
    question = f"Is it true that {ZOR}?"
    told = [user(ZOR), ANSWER, user(question)]
    assert without_repeats(told, DOCUMENTS, [question]) == told


@pytest.mark.parametrize("joint", [" ", "\n", ' "'], ids=["space", "line", "quote"])
def test_documents_with_the_same_beginning_get_different_references(joint: str) -> None:
    head = f"Acme Corp internal{joint}handbook, revision of May 2026, confidential."
    holidays, sick = f"{head} Holidays: thirty days. {ZOR}", f"{head} Sick leave: six weeks. {ZOR}"
    documents = [("holidays", holidays), ("sick", sick)]
    told = [user(f"{holidays}\n{sick}\nOne?"), ANSWER, user(f"{sick}\nTwo?"), user(f"{holidays}\nThree?")]
    *_, second, third = without_repeats(told, documents)
    for message, named, other in ((second, "Sick", "Holidays"), (third, "Holidays", "Sick")):
        content = str(message["content"])
        assert content.startswith("[shown above:")
        assert named in content
        assert other not in content
    assert without_repeats(told[:3], documents) == without_repeats(told, documents)[:3]


def test_a_document_that_is_the_beginning_of_another_is_shown_again() -> None:
    told = [user(ZOR), user(f"{ZOR} {MEL}"), user(f"{ZOR} Who?"), user(f"{ZOR} {MEL} Where?")]
    documents = [("short", ZOR), ("long", f"{ZOR} {MEL}")]
    assert without_repeats(told, documents) == told


def test_a_document_seen_later_changes_no_earlier_reference() -> None:
    later = f"{ZOR[:60]} is quite another story, {MEL}"
    told = [user(ZOR), user(f"{ZOR} Who?"), user(later), user(f"{ZOR} When?")]
    changed = without_repeats(told, [*DOCUMENTS, ("later", later)])
    assert changed[1]["content"] == f"{reference_to(ZOR)} Who?"
    assert changed[3]["content"] != f"{reference_to(ZOR)} When?"


def test_tools_and_lists_of_texts_are_looked_at() -> None:
    tool = {"role": "tool", "tool_call_id": "1", "content": ZOR}
    listed = {"role": "user", "content": [{"type": "text", "text": f"{ZOR} Who?"}]}
    _, second, third = without_repeats([user(ZOR), tool, listed], DOCUMENTS)
    assert second == {**tool, "content": reference_to(ZOR)}
    assert third["content"] == [{"type": "text", "text": f"{reference_to(ZOR)} Who?"}]
