"""A tokenizer and chat template in this process, as a server of RAGCache asks its own: for tests without one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as Bytes
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from ragcache_core.errors import PromptError
from ragcache_core.prompt import ChatMessage, PromptDocument, RenderedPrompt, TokenizedText, common_prefix_len, texts_of
from ragcache_core.recognition import PromptTexts, bytes_of_tokens
from ragcache_core.types import PromptSegment, SegmentKind
from ragcache_core.wire import tile

Render = Callable[[Sequence[ChatMessage], Mapping[str, Any]], str]


class LocalTokenizer:
    """A :class:`~ragcache_core.prompt.PromptTokenizer`. ``render`` returns the text of messages with settings."""

    finds_documents = True
    identity = "local"

    def __init__(self, tokenizer: Tokenizer, render: Render, control_tokens: frozenset[str] = frozenset()) -> None:
        added = tokenizer.get_added_tokens_decoder().values()
        self.control_tokens = control_tokens.union(token.content for token in added if token.special)
        self.render = render
        self._tokenizer = tokenizer
        words = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
        kind = "wordpiece" if any(word and word.startswith("##") for word in words) else "byte_level"
        self._texts = PromptTexts(bytes_of_tokens(words, kind), lambda text: self._ids(text))

    @classmethod
    @cache
    def of_model(cls, folder: str) -> LocalTokenizer:
        """Return the tokenizer of a model in Hugging Face format."""
        tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
        settings = json.loads((Path(folder) / "tokenizer_config.json").read_text(encoding="utf-8"))
        file = Path(folder) / "chat_template.jinja"
        template = file.read_text(encoding="utf-8") if file.is_file() else settings.get("chat_template", "")
        names = {name: value for name, value in settings.items() if name.endswith("_token") and isinstance(value, str)}
        return cls(tokenizer, rendering(template, names), frozenset(names.values()))

    @classmethod
    def of_bytes(cls, template: str, *, wraps_text: bool = False) -> LocalTokenizer:
        """Return a tokenizer of bytes with the control tokens of ChatML."""
        tokenizer = Tokenizer(BPE({letter: i for i, letter in enumerate(sorted(ByteLevel.alphabet()))}, []))
        tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
        tokenizer.decoder = Bytes()
        tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<|im_start|>", "<|im_end|>")])
        return cls(tokenizer, rendering(template, wraps_text=wraps_text))

    def encode(self, text: str, *, add_special_tokens: bool = False) -> TokenizedText:
        return TokenizedText(tuple(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids))

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(token_ids))

    def lay_out(
        self,
        messages: Sequence[ChatMessage],
        documents: Sequence[PromptDocument],
        *,
        other: Sequence[ChatMessage] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> RenderedPrompt:
        token_ids = self._ids(self.render(messages, settings or {}))
        if other is not None:
            num_common = common_prefix_len(token_ids, self._ids(self.render(other, settings or {})))
            token_ids = token_ids[: max(num_common - 1, 0)]
        places = self._texts.find(token_ids, [(each.text, each.num_others) for each in documents])
        segments = [
            PromptSegment(SegmentKind.DOCUMENT, *place, each.doc_id)
            for each, place in zip(documents, places, strict=True)
            if place is not None
        ]
        shown = () if other is not None else tuple(messages)
        return RenderedPrompt(shown, tuple(token_ids), tile(segments, len(token_ids)))

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def rendering(template: str, variables: Mapping[str, Any] | None = None, *, wraps_text: bool = False) -> Render:
    """Return what renders messages with a chat template, about as vLLM does."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    environment.globals["raise_exception"] = _refuse
    compiled = environment.from_string(template)

    def render(messages: Sequence[ChatMessage], settings: Mapping[str, Any]) -> str:
        given = {**settings, **(settings.get("extra_body") or {})}
        known = {**(variables or {}), **(given.get("chat_template_kwargs") or {})}
        try:
            shown = [_shown(message, wraps_text=wraps_text) for message in messages]
            return compiled.render(
                **known, messages=shown, tools=given.get("tools"), documents=None, add_generation_prompt=True
            )
        except Exception as error:
            raise PromptError(f"the chat template cannot render these messages: {error}") from error

    return render


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _shown(message: ChatMessage, *, wraps_text: bool) -> dict[str, Any]:
    shown = {name: value for name, value in message.items() if value is not None}
    texts = texts_of(message.get("content"))
    shown["content"] = [{"type": "text", "text": text} for text in texts] if wraps_text else "\n".join(texts)
    if calls := shown.pop("tool_calls", None):
        shown["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
            for call in calls
        ]
    return shown
