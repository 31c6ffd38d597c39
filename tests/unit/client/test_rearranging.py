"""Documents of a chat in another order: what belongs to each goes with it, or nothing is moved."""

from __future__ import annotations

import pytest

from ragcache_core.client.prompts.layout_learner import Rearranged, rearranged

SUN, MOON, MARS = (f"The {name} is what all of this is about, and it is bright." for name in ("sun", "moon", "planet"))
SHOWN = [("sun", SUN), ("moon", MOON), ("mars", MARS)]


def moved(content: str, order: tuple[int, ...]) -> str | None:
    """Return the content afterwards; None where nothing is moved."""
    system = {"role": "system", "content": "Be brief."}
    found = rearranged([system, {"role": "user", "content": content}], SHOWN, order)
    if isinstance(found, str):
        return None
    assert found.messages[0] == system
    assert found.doc_ids == tuple(SHOWN[i][0] for i in order)
    return str(found.messages[1]["content"])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (f"{SUN}\n\n{MOON}\n\nQuestion: Who?", f"{MOON}\n\n{SUN}\n\nQuestion: Who?"),
        (f"Document: {SUN}\n\nDocument: {MOON}\n\nWho?", f"Document: {MOON}\n\nDocument: {SUN}\n\nWho?"),
        (f"Context:\n---\n{SUN}\n---\n{MOON}\n---\nWho?", f"Context:\n---\n{MOON}\n---\n{SUN}\n---\nWho?"),
        (f"[sun] {SUN}\n[moon] {MOON}\nWho?", f"[moon] {MOON}\n[sun] {SUN}\nWho?"),
        (f"Read.\n\nid sun: {SUN}\n\nid moon: {MOON}", f"Read.\n\nid moon: {MOON}\n\nid sun: {SUN}"),
    ],
)
def test_two_documents_change_places_with_what_is_theirs(before: str, after: str) -> None:
    assert moved(before, (1, 0)) == after
    assert moved(before, (0, 1)) == before


def test_three_documents_are_shown_in_any_order() -> None:
    text = "\n".join(f"<doc>{shown}</doc>" for _, shown in SHOWN)
    expected = "\n".join(f"<doc>{shown}</doc>" for shown in (MARS, SUN, MOON))
    assert moved(text, (2, 0, 1)) == expected


@pytest.mark.parametrize(
    "content",
    [
        f"[1] {SUN}\n\n[2] {MOON}\n\nWho?",
        f"1. {SUN}\n2. {MOON}",
        f"{SUN} (a.txt)\n\n{MOON} (b.txt)",
        f"{SUN}\n\n{MOON} and {MARS}",
        f"As of 1999: {SUN}\n\nAs of 2001: {MOON}",
    ],
    ids=["numbers", "a list", "sources", "sentences", "dates"],
)
def test_what_may_be_cited_or_says_something_of_its_document_is_not_moved_to_another(content: str) -> None:
    assert moved(content, tuple(reversed(range(content.count("The "))))) is None


def test_documents_of_several_turns_stay() -> None:
    chat = [{"role": "user", "content": f"{SUN}\n\n{MOON}\n\nWho?"}, {"role": "assistant", "content": MARS}]
    assert isinstance(rearranged(chat, SHOWN, (1, 0)), Rearranged)  # what an answer says is no document
    assert "one message of plain text" in str(rearranged([*chat, {"role": "user", "content": MARS}], SHOWN, (1, 0)))


def test_what_the_question_quotes_is_not_moved() -> None:
    asked = f"Is it so that {SUN}"
    found = rearranged([{"role": "user", "content": f"{SUN}\n\n{MOON}\n\n{asked}"}], SHOWN, (1, 0), [asked])
    assert isinstance(found, Rearranged)
    assert found.messages[0]["content"] == f"{MOON}\n\n{SUN}\n\n{asked}"
