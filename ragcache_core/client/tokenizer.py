"""The model's own tokenizer and chat template, in this process."""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from ragcache_core.client.importing import import_requests
from ragcache_core.errors import PromptError, TokenizerUnavailableError
from ragcache_core.prompt import ChatMessage, PromptTokenizer, TokenizedText

logger = logging.getLogger(__name__)

PROBE: tuple[ChatMessage, ...] = (
    {"role": "system", "content": "Answer the question."},
    {"role": "user", "content": "Document: Ünïcode, 1,234.5\n\nQuestion: Who?"},
)
"""Messages that are tokenised here and by the server, to see that both agree."""
_MAX_KEPT_CHARS = 1 << 18
"""Tokens of so much text are kept: a prompt that was speculated is asked again. About 10 MiB."""


class ModelTokenizer:
    """A :class:`~ragcache_core.prompt.PromptTokenizer` over the tokenizer files of a model (transformers).

    Thread-safe. It gives the ids that vLLM's server gives for the same text or messages; a test holds it to that.
    """

    def __init__(self, model: str | os.PathLike[str], *, chat_template: str | None = None) -> None:
        """Load the tokenizer of ``model``, a folder or a name in the local Hugging Face cache.

        ``chat_template`` replaces the model's own: a template, or the path of one.

        Raises:
            TokenizerUnavailableError: no fast tokenizer can be loaded from there.
        """
        try:
            from transformers import AutoTokenizer

            self._tokenizer: Any = AutoTokenizer.from_pretrained(os.fspath(model))
        except Exception as error:  # transformers raises OSError, ValueError, KeyError, ImportError and more
            raise TokenizerUnavailableError(
                f"no tokenizer can be loaded from {os.fspath(model)!r} ({error}): pass tokenizer= with a folder that "
                "holds the model's tokenizer files"
            ) from error
        if not self._tokenizer.is_fast:
            raise TokenizerUnavailableError(
                f"the tokenizer of {os.fspath(model)!r} has no character offsets (it is not a 'fast' one), so "
                "documents cannot be found in its tokens: pass tokenizer= with the folder of a fast one"
            )
        self._chat_template = _read_template(chat_template)
        self._lock = threading.Lock()
        self._latest = _LatestTexts(_MAX_KEPT_CHARS)

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """Return the text that the chat template makes of ``messages``, ready for the answer.

        Raises:
            PromptError: the model has no chat template, or the template refuses the messages.
        """
        try:
            with self._lock:
                text: str = self._tokenizer.apply_chat_template(
                    [dict(m) for m in messages],
                    chat_template=self._chat_template,
                    tokenize=False,
                    add_generation_prompt=True,
                )
        except Exception as error:  # jinja2's errors and transformers' ValueError
            raise PromptError(f"the chat template cannot render these messages: {error}") from error
        return text

    def encode(self, text: str, *, add_special_tokens: bool = False) -> TokenizedText:
        """Return the token ids of ``text`` with character offsets."""
        key = (text, add_special_tokens)
        with self._lock:
            if (tokenized := self._latest.get(key)) is not None:
                return tokenized
            encoding = self._tokenizer(
                text,
                add_special_tokens=add_special_tokens,
                return_offsets_mapping=True,
                return_attention_mask=False,
                verbose=False,
            )
        tokenized = TokenizedText(tuple(encoding["input_ids"]), tuple(map(tuple, encoding["offset_mapping"])))
        with self._lock:
            self._latest.put(key, tokenized)
        return tokenized


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


def checked_tokenizer(
    load: Callable[[], PromptTokenizer], server_token_ids: Callable[[Sequence[ChatMessage]], list[int] | None]
) -> PromptTokenizer | TokenizerUnavailableError:
    """Return the tokenizer if it gives the server's own token ids for a probe, else why there is none.

    Prompts that are tokenised here must be the prompts that the server would have made of the same messages.
    """
    try:
        tokenizer = load()
        try:
            ours = list(tokenizer.encode(tokenizer.render(PROBE)).token_ids)
        except PromptError as error:
            raise TokenizerUnavailableError(f"{error}: serve a chat model, or pass chat_template=") from error
        theirs = server_token_ids(PROBE)
        if theirs is not None and theirs != ours:
            raise TokenizerUnavailableError(
                f"the tokenizer at hand gives {len(ours)} token ids for a probe, other ones than the server's "
                f"{len(theirs)}: pass tokenizer= with the server's own"
            )
    except TokenizerUnavailableError as error:
        logger.warning("The documents of this engine's requests will not be known: %s", error)
        return error
    return tokenizer


def preload(load: Callable[[], PromptTokenizer]) -> Callable[[], PromptTokenizer]:
    """Start ``load`` in a thread, while the server loads; return what waits for its result.

    The thread then imports what the first request needs, too.
    """
    future: Future[PromptTokenizer] = Future()

    def run() -> None:
        try:
            future.set_result(load())
        except BaseException as error:
            future.set_exception(error)
        import_requests()

    threading.Thread(target=run, name="ragcache-tokenizer", daemon=True).start()
    return future.result


def _read_template(chat_template: str | None) -> str | None:
    if chat_template is not None and "{" not in chat_template and Path(chat_template).is_file():
        return Path(chat_template).read_text(encoding="utf-8")
    return chat_template
