"""A conversation about documents: each prompt begins with the one before it, which the engine has in its cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ragcache_core.errors import PromptTooLongError, TokenizerUnavailableError
from ragcache_core.prompt import ChatMessage, PromptLayout, check_prompt_fits, render_chat
from ragcache_core.types import Document

if TYPE_CHECKING:
    from ragcache_core.client import Engine
    from ragcache_core.client.generation import Prompt

DEFAULT_MAX_TOKENS = 256


@dataclass(frozen=True, slots=True)
class _AskedTurn:
    asked: ChatMessage
    answer: str
    documents: tuple[Document, ...]


@dataclass(slots=True)
class Conversation:
    """Questions and answers so far. A document that was shown with a question is not shown again with a later one."""

    layout: PromptLayout
    _turns: list[_AskedTurn] = field(default_factory=list)

    def prompt(self, engine: Engine, documents: Sequence[Document], question: str, max_tokens: int | None) -> Prompt:
        """Return the prompt for ``question``, with room for ``max_tokens`` or, behind other questions, the default.

        Where the context window is too short, the earlier half of the conversation is dropped, so that the next prompts
        share a prefix again.

        Raises:
            PromptError: the question is empty. PromptTooLongError: it does not fit alone.
        """
        while True:
            try:
                tokenizer = engine.tokenizer
                if not self._turns:
                    prompt = self.layout.render(tokenizer, documents, question)
                    check_prompt_fits(len(prompt.token_ids), engine.max_model_len, max_tokens or 1)
                    return prompt
                shown = [(d.doc_id, self.layout.document_text(d)) for d in [*self._shown(), *self._new(documents)]]
                prompt = render_chat(tokenizer, self._messages(documents, question), shown)
                check_prompt_fits(len(prompt.token_ids), engine.max_model_len, max_tokens or DEFAULT_MAX_TOKENS)
                return prompt
            except TokenizerUnavailableError:  # the server tokenises; which tokens are which document stays unknown
                return self._messages(documents, question)
            except PromptTooLongError:
                if not self._turns:
                    raise
                del self._turns[: (len(self._turns) + 1) // 2]

    def add(self, documents: Sequence[Document], question: str, answer: str) -> None:
        """Remember a question that was answered."""
        new = self._new(documents)
        self._turns.append(_AskedTurn(self.layout.messages(new, question)[-1], answer, tuple(new)))

    def clear(self) -> None:
        """Forget everything."""
        self._turns.clear()

    def __len__(self) -> int:
        return len(self._turns)

    def _shown(self) -> list[Document]:
        return [document for turn in self._turns for document in turn.documents]

    def _new(self, documents: Sequence[Document]) -> list[Document]:
        shown = {document.doc_id for document in self._shown()}
        return [document for document in documents if document.doc_id not in shown]

    def _messages(self, documents: Sequence[Document], question: str) -> list[ChatMessage]:
        *prefix, asked = self.layout.messages(self._new(documents), question)
        for turn in self._turns:
            prefix += [turn.asked, {"role": "assistant", "content": turn.answer}]
        return [*prefix, asked]
