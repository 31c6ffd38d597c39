"""Ask questions as turns of conversations, whose documents come again: shown each time, or referred to."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from ragcache_core.client.prompts.repeated_documents import without_repeats
from ragcache_core.errors import ConfigError
from ragcache_core.prompt import ChatMessage, PromptLayout, render_chat
from ragcache_core.quality.asking import Asked, AskedAnswer, scored
from ragcache_core.quality.questions import Question

MAX_TURNS = 4
_NUM_OPEN = 32


def conversations_of(questions: Sequence[Question]) -> list[list[Question]]:
    """Return the questions as turns: each joins the latest conversation that holds one of its documents, or begins one.

    A conversation has 4 turns at most, and those of one turn are left out: there nothing comes again.

    Raises:
        ConfigError: no two questions share a document.
    """
    found: list[list[Question]] = []
    open_ones: deque[list[Question]] = deque(maxlen=_NUM_OPEN)
    for question in questions:
        held = {document.doc_id for document in question.documents}
        for turns in reversed(open_ones):
            if len(turns) < MAX_TURNS and held & {d.doc_id for turn in turns for d in turn.documents}:
                turns.append(question)
                break
        else:
            found.append([question])
            open_ones.append(found[-1])
    if not (found := [turns for turns in found if len(turns) > 1]):
        raise ConfigError(
            "no two of the questions share a document, so that none comes again in a conversation: give questions over "
            "the same documents"
        )
    return found


def answers_in_conversations(
    engine: Asked,
    conversations: Sequence[Sequence[Question]],
    *,
    refers: bool,
    layout: PromptLayout = PromptLayout(),  # noqa: B008 (frozen)
    max_tokens: int = 64,
    report: Callable[[int], object] = lambda _: None,
) -> list[AskedAnswer]:
    """Return the greedy answers to all turns but the first ones; what was answered before is part of each prompt.

    With ``refers`` a document that the conversation shows already is referred to.

    Raises:
        PromptTooLongError, RequestRejectedError, EngineDiedError, ...
    """
    answers = []
    for turns in conversations:
        told: list[ChatMessage] = []
        shown: dict[str, str] = {}
        for number, question in enumerate(turns):
            messages = layout.messages(question.documents, question.text)
            told += messages if not told else messages[-1:]
            shown |= {document.doc_id: document.text for document in question.documents}
            sent = without_repeats(told, shown.items()) if refers else told
            generation = engine.generate(render_chat(engine.tokenizer, sent, shown.items()), max_tokens=max_tokens)
            told.append({"role": "assistant", "content": generation.text})
            if number:
                answers.append(scored(question, generation))
            report(1)
    return answers
