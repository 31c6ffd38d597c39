"""The model's own tokenizer and chat template, in this process."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ragcache_core.client.server_api import ServerAPI
from ragcache_core.errors import PromptError, TokenizerUnavailableError
from ragcache_core.log import logger_of
from ragcache_core.prompt import ChatMessage, TokenizedText, escape_documents
from ragcache_core.runtime.tokenizer_files import TokenizerFiles

logger = logger_of(__name__)

PROBE: tuple[ChatMessage, ...] = (
    {"role": "system", "content": "Answer the question."},
    {"role": "user", "content": "Document: Ünïcode, 1,234.5  it's 東京 🙂\n\n\tx = [1]\n\nQuestion: Who?"},
)
"""Messages that are tokenised here and by the server, to see that both agree."""
_MAX_KEPT_CHARS = 1 << 18
"""Tokens of so much text are kept: a prompt that was speculated is asked again. About 10 MiB."""


class ModelTokenizer:
    """A :class:`~ragcache_core.prompt.PromptTokenizer` over the tokenizer files of a model.

    Thread-safe. It gives the ids that vLLM's server gives for the same text or messages; a test holds it to that.

    Attributes:
        control_tokens: what begins and ends messages, and is broken up in documents, where it must not. An empty set
            leaves documents as they are.
    """

    def __init__(self, model: str | os.PathLike[str] | TokenizerFiles, *, chat_template: str | None = None) -> None:
        """Load the tokenizer of ``model``: a folder, a name of the Hugging Face hub, or what a server handed out.

        ``chat_template`` replaces the model's own: a template, or the path of one.

        Raises:
            TokenizerUnavailableError: there is no ``tokenizer.json``, or it is damaged.
            PromptError: the chat template cannot be read.
        """
        from ragcache_core.client.prompts.chat_template import ChatTemplate  # Jinja takes 40 ms

        files = model if isinstance(model, TokenizerFiles) else TokenizerFiles.read(model)
        if chat_template is not None:
            files = replace(files, chat_template=_read_template(chat_template))
        try:
            self._tokenizer = Tokenizer.from_str(files.tokenizer)
        except Exception as error:  # of the Rust library: no narrower class
            raise TokenizerUnavailableError(
                f"the tokenizer cannot be loaded ({error}): pass tokenizer= with a folder that holds the model's "
                "tokenizer.json, or with a name of the hub"
            ) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        variables = {**files.special_tokens, **files.template_settings}
        self._chat_template = (
            None
            if files.chat_template is None
            else ChatTemplate(files.chat_template, variables, wraps_text=files.wraps_text)
        )
        special = control_tokens_of(self._tokenizer, files.chat_template or "")
        self.control_tokens = special.union(files.special_tokens.values())
        self._lock = threading.Lock()
        self._latest = _LatestTexts(_MAX_KEPT_CHARS)

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """Return the text that the chat template makes of ``messages``, ready for the answer.

        Raises:
            PromptError: the model has no chat template, or the template refuses the messages.
        """
        return self._render(messages)

    def of_chat(self, tools: Sequence[Mapping[str, Any]] | None, variables: Mapping[str, Any]) -> ChatTokenizer:
        """Return this tokenizer for chats with ``tools`` and these variables of the chat template."""
        return ChatTokenizer(self, partial(self._render, tools=tools, variables=variables))

    def _render(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        if self._chat_template is None:
            raise PromptError("the model has no chat template: serve it with one, --chat-template FILE")
        return self._chat_template.render(messages, tools, variables)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> TokenizedText:
        """Return the token ids of ``text`` with character offsets."""
        key = (text, add_special_tokens)
        with self._lock:
            if (tokenized := self._latest.get(key)) is not None:
                return tokenized
        encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        tokenized = TokenizedText(tuple(encoding.ids), tuple(encoding.offsets))
        with self._lock:
            self._latest.put(key, tokenized)
        return tokenized

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ``token_ids``, without special tokens."""
        text: str = self._tokenizer.decode(list(token_ids))
        return text

    def num_tokens(self, text: str) -> int:
        """Return how many tokens a document of that text has in a prompt, its control tokens broken up as there."""
        (shown,) = escape_documents(self, [{"role": "user", "content": text}], [("", text)])
        return len(self._tokenizer.encode(shown["content"], add_special_tokens=False).ids)


@dataclass(frozen=True, slots=True)
class ChatTokenizer:
    """A tokenizer whose chat template is told more than the messages."""

    base: ModelTokenizer
    render: Callable[[Sequence[ChatMessage]], str]

    @property
    def control_tokens(self) -> frozenset[str]:
        """Those of the tokenizer."""
        return self.base.control_tokens

    def encode(self, text: str, *, add_special_tokens: bool = False) -> TokenizedText:
        """Return the token ids of ``text`` with character offsets."""
        return self.base.encode(text, add_special_tokens=add_special_tokens)


def control_tokens_of(tokenizer: Tokenizer, chat_template: str) -> frozenset[str]:
    """Return the texts that ``tokenizer`` takes for special tokens, and added tokens that the chat template writes."""
    added = tokenizer.get_added_tokens_decoder().values()
    return frozenset(token.content for token in added if token.special or token.content in chat_template)


class _LatestTexts:
    """The tokens of the texts that were asked for last, of ``max_chars`` characters together."""

    def __init__(self, max_chars: int) -> None:
        self._room_chars = max_chars
        self._texts: OrderedDict[tuple[str, bool], TokenizedText] = OrderedDict()

    def get(self, key: tuple[str, bool]) -> TokenizedText | None:
        if key not in self._texts:
            return None
        self._texts.move_to_end(key)
        return self._texts[key]

    def put(self, key: tuple[str, bool], tokenized: TokenizedText) -> None:
        if key in self._texts:
            return
        self._texts[key] = tokenized
        self._room_chars -= len(key[0])
        while self._room_chars < 0:
            (text, _), _ = self._texts.popitem(last=False)
            self._room_chars += len(text)


def handed_out(server: ServerAPI) -> ModelTokenizer | None:
    """Return the tokenizer that a server hands out, if it does.

    Raises:
        TokenizerUnavailableError: its model has none that could be.
    """
    files = server.tokenizer_files()
    return None if files is None else ModelTokenizer(files)


def checked_tokenizer(
    load: Callable[[], ModelTokenizer], server_token_ids: Callable[[Sequence[ChatMessage]], list[int] | None]
) -> ModelTokenizer | TokenizerUnavailableError:
    """Return the tokenizer if it gives the server's own token ids for a probe, else why there is none.

    Prompts that are tokenised here must be the prompts that the server would have made of the same messages.
    """
    try:
        try:
            tokenizer = load()
            ours = list(tokenizer.encode(tokenizer.render(PROBE)).token_ids)
        except PromptError as error:
            if isinstance(error, TokenizerUnavailableError):
                raise
            raise TokenizerUnavailableError(str(error)) from error
        theirs = server_token_ids(PROBE)
        if theirs is not None and theirs != ours:
            raise TokenizerUnavailableError(
                f"the tokenizer at hand gives {len(ours)} token ids for a probe, other ones than the server's "
                f"{len(theirs)}: pass tokenizer= with the server's own"
            )
    except TokenizerUnavailableError as error:
        logger.warning("RC-TOKENIZER-MISSING: the documents of this engine's requests will not be known: %s", error)
        return error
    return tokenizer


def _read_template(chat_template: str | None) -> str | None:
    if chat_template is not None and "{" not in chat_template and Path(chat_template).is_file():
        return Path(chat_template).read_text(encoding="utf-8")
    return chat_template
