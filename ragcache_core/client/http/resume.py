"""A streamed answer that continues after its engine failed: the text so far, and the request for the rest.

RAGCache §6: "the request can continue computation by reusing the stored KV cache". The next request has the prompt and
the tokens of the answer so far, which the server names (``return_token_ids``): nothing is tokenised again.

**Greedy.** The rest follows from the tokens before it, so it is verified: the last characters are generated again and
compared, and the client gets what one engine would have said::

    prompt | text so far                     | so far, above all what tokens after the mark hold | lost
           |                                 ^ mark                                            ^ the engine failed
    ------- next prompt ---------------------|---- generated again: compared, left out --------|--- passed on

The mark is an event with text, some characters before the end: an event's last token may be a part of a character, and
no server continues that text. Where the text differs, all of it is generated again and compared. A server holds back as
much text as could begin a stop string, ``len(stop) - 1`` characters: the tokens of an event reach so far beyond its
text. A stop string may begin before the mark, which is so far before the end for that reason.

**Sampled.** Text that is sampled again differs, so nothing is generated twice. The client gets text up to the end of an
event's tokens alone, where no stop string can have begun, and the next prompt ends exactly there. Without stop strings
that is each event as it arrives; with stop strings the text is late by about one token more than the server makes it.
Tokens of an unfinished character are dropped. The rest has another random state than one engine would have had.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, Literal, NamedTuple, Self

import httpx

from ragcache_core.client.http.errors import reports_engine_death
from ragcache_core.client.speculation.request_capture import asks_completion
from ragcache_core.errors import EngineDiedError
from ragcache_core.stats import RequestStats

ResumeStreams = Literal["all", "greedy", "off"]
"""Which streamed answers continue after an engine failure."""
Decode = Callable[[list[int]], Awaitable[str | None]]
"""Returns the text of token ids; ``None`` where the server does not tell it."""
_GREEDY_BELOW = 1e-5
"""Of temperatures: vLLM's own limit."""
_HARMLESS = frozenset(
    {
        *("model", "messages", "prompt", "stream", "max_tokens", "max_completion_tokens", "min_tokens"),
        *("stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "top_p", "top_k", "min_p", "seed"),
        *("user", "metadata", "store", "cache_salt", "kv_transfer_params", "priority", "request_id", "logit_bias"),
        *("repetition_penalty", "skip_special_tokens", "spaces_between_special_tokens", "add_special_tokens"),
        *("chat_template", "chat_template_kwargs", "add_generation_prompt", "parallel_tool_calls", "temperature"),
    }
)
"""What a request may say whatever it says: the rest of its answer does not depend on where that was cut."""
_NEUTRAL: dict[str, object] = {
    "n": 1,
    "best_of": 1,
    "echo": False,
    "logprobs": False,
    "return_token_ids": False,
    "use_beam_search": False,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "tool_choice": "none",
    "response_format": {"type": "text"},
}
"""What it may say only with these values."""
_COMPLETION_TOKENS = 16
"""How long a completion, but no chat, is where its request does not say: a default of the protocol's."""
_COMPARED = 16
"""Characters that are told again at least."""
_PREFIXES = ("chatcmpl-", "cmpl-")
_NO_SEED = -1
"""vLLM's own."""
_PARTIAL_CHARACTER = "\ufffd"
"""How a tokenizer decodes the bytes of an unfinished character."""
_CHARACTER_BYTES = 4
"""The most bytes of a UTF-8 character; each may be a token."""
_DECODED_TOKENS = 16
_MAX_ANSWERS = 1024
# An application may never read the statistics of an answer: the oldest is dropped.


class _Mark(NamedTuple):
    """The end of an event with text: the answer's tokens and characters up to there, and the event's own tokens."""

    num_ids: int
    num_chars: int
    num_event_ids: int


class ResumableStream:
    """The events of one streamed answer, whichever engines give it; holds no connection.

    :meth:`read` takes what a server sends, and returns what the client gets. After a cut, :meth:`rest` is the request
    whose answer :meth:`read` takes next.

    Attributes:
        is_sampled: whether the answer depends on a random state.
        num_resumes: how often it continued after the client had a part of its text.
    """

    def __init__(self, request: httpx.Request, body: dict[str, Any]) -> None:
        self.is_sampled = not _is_greedy(body)
        self.num_resumes = 0
        self._request = request
        self._body = body
        stops = body.get("stop") or []
        self._stops: list[str] = [stops] if isinstance(stops, str) else stops
        self._overlap = max(map(len, self._stops), default=1) - 1
        self._held = 0 if body.get("include_stop_str_in_output") else self._overlap
        prompt = body.get("prompt")
        self._prompt_ids: list[int] | None = prompt if isinstance(prompt, list) else None
        self._ids: list[int] = []
        self._text = ""
        self._num_passed_on = 0  # characters that the client has
        self._marks = [_Mark(0, 0, 0)]
        self._replayed = ""
        self._num_ids_before = 0
        self._limit: int | None = None
        self._first: dict[str, Any] | None = None
        self._buffer = b""
        self._is_known = True
        self._has_finish_reason = self._is_done = False

    @classmethod
    def of(cls, request: httpx.Request, which: ResumeStreams = "all") -> Self | None:
        """Return the stream that ``request`` asks for; ``None`` where its answer cannot continue after a cut.

        Args:
            request: with its body read.
            which: the answers that continue.
        """
        if which == "off" or not asks_completion(request) or not is_streamed(request):
            return None
        try:
            body = json.loads(request.content)
        except ValueError:
            return None
        return cls(request, body) if isinstance(body, dict) and can_resume(body, which) else None

    def request(self) -> httpx.Request:
        """Return the request that is sent first."""
        return self._request_with({})

    def set_defaults(self, defaults: str | None) -> None:
        """Take in what the server adds to requests, :data:`~ragcache_core.wire.DEFAULTS_HEADER`.

        Without that it is not known when the answer ends.
        """
        try:
            added = json.loads(defaults or "null")
        except ValueError:
            added = None
        if not isinstance(added, dict):
            self._is_known = False
            return
        settings = {name: value for name, value in self._body.items() if value is not None}
        most, is_parsed = added.pop("most_tokens", None), added.pop("is_parsed", False)
        default = added.pop("max_tokens", None)
        if "messages" in settings:
            limits = [settings.get("max_completion_tokens"), settings.get("max_tokens"), default]
        else:
            limits, is_parsed = [settings.get("max_tokens"), _COMPLETION_TOKENS], False
        limit = next((limit for limit in limits if limit is not None), None)
        self._limit = min((tokens for tokens in (limit, most) if tokens is not None), default=None)
        self._is_known = not is_parsed and can_resume({**added, **settings})

    @property
    def response_id(self) -> str | None:
        """The id under which the client knows the answer."""
        return None if self._first is None else self._first["id"]

    @property
    def is_finished(self) -> bool:
        """Whether nothing is missing, or nothing that could be had."""
        return self._is_done or not self._is_known

    def read(self, part: bytes) -> bytes:
        """Return what the client gets of the next bytes: whole events.

        Raises:
            httpx.RemoteProtocolError: the server says that its engine died.
            EngineDiedError: it goes on otherwise than it had begun.
        """
        *events, self._buffer = (self._buffer + part).split(b"\n\n")
        return b"".join(out + b"\n\n" for event in events if (out := self._client_event(event)) is not None)

    async def rest(self, decode: Decode) -> httpx.Request | None:
        """Return the request for what is missing; ``None`` if the answer was cut where it cannot go on.

        ``decode`` finds unfinished characters, if a sampled answer was cut after an event of several tokens.
        """
        self._buffer = b""
        if self._first is None and self._is_known:  # the client has nothing yet
            return self.request()
        if not self._is_known or self._prompt_ids is None or self._has_finish_reason:
            return None
        if not (await self._rewind_sampled(decode) if self.is_sampled else self._rewind_greedy()):
            return None
        num_ids = self._num_ids_before = len(self._ids)
        self.num_resumes += self._num_passed_on > 0
        ids = [*self._prompt_ids, *self._ids]
        changes: dict[str, Any] = {"request_id": self._own_id()}
        if "messages" in self._body:
            changes["kv_transfer_params"] = {**(self._body.get("kv_transfer_params") or {}), "prompt_token_ids": ids}
        else:
            changes["prompt"] = ids
        if self._limit is not None:
            is_named = self._body.get("max_completion_tokens") is not None
            changes["max_completion_tokens" if is_named else "max_tokens"] = max(self._limit - num_ids, 0)
        if self._body.get("min_tokens") is not None:
            changes["min_tokens"] = max(self._body["min_tokens"] - num_ids, 0)
        seed = self._body.get("seed")
        if self.is_sampled and isinstance(seed, int) and seed != _NO_SEED:
            changes["seed"] = (seed + num_ids) % 2**63  # the same seed would repeat the random numbers of the beginning
        return self._request_with(changes)

    def _rewind_greedy(self) -> bool:
        """Go back to an event so far before the end that its text can be compared; return whether there is one."""
        num_delivered = len(self._text) - len(self._replayed)
        while self._marks[-1].num_ids and self._marks[-1].num_chars + max(self._overlap, _COMPARED) > num_delivered:
            self._marks.pop()
        self._replayed = self._text[self._end_of(self._marks[-1]) :]
        del self._ids[self._marks[-1].num_ids :]
        return True

    async def _rewind_sampled(self, decode: Decode) -> bool:
        """Go back to the tokens of the text that the client has; return whether these are known."""
        while self._marks[-1].num_ids and self._end_of(self._marks[-1]) > self._num_passed_on:
            self._marks.pop()
        mark = self._marks[-1]
        ids = self._ids[: mark.num_ids]
        if mark.num_event_ids > 1:  # else its text would have waited for the rest of the character
            whole = await _whole_characters(ids, decode)
            if whole is None:
                return False
            ids, self._marks[-1] = whole, mark._replace(num_ids=len(whole), num_event_ids=1)
        self._ids, self._text = ids, self._text[: self._num_passed_on]
        return True

    def _end_of(self, mark: _Mark) -> int:
        """Return how many characters the tokens of an event reach to."""
        return mark.num_chars + self._held if mark.num_ids else 0

    def _resumable_end(self) -> int:
        """Return how many characters of a sampled answer the client can have, if it is to continue after them."""
        for mark in reversed(self._marks):
            end = self._end_of(mark)
            if end <= self._num_passed_on:
                break
            if end <= len(self._text) and not self._may_begin_stop(self._text[max(end - self._overlap, 0) : end]):
                return end
        return self._num_passed_on

    def _may_begin_stop(self, text: str) -> bool:
        """Return whether ``text`` ends with the beginning of a stop string, which a next request would not see."""
        return any(text.endswith(stop[:length]) for stop in self._stops for length in range(1, len(stop)))

    def _request_with(self, changes: dict[str, Any]) -> httpx.Request:
        headers = [(name, value) for name, value in self._request.headers.raw if name.lower() != b"content-length"]
        body = {**self._body, **changes, "return_token_ids": True}
        content = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
        original = self._request
        return httpx.Request(
            original.method, original.url, headers=headers, content=content, extensions=original.extensions
        )

    def _own_id(self) -> str:
        """Return the id that makes the next answer's the same, in which its figures are found."""
        assert self._first is not None
        own: str = self._first["id"]
        return next((own.removeprefix(prefix) for prefix in _PREFIXES if own.startswith(prefix)), own)

    def _client_event(self, raw: bytes) -> bytes | None:
        """Return what the client gets of an event; ``None`` is nothing."""
        if not raw.startswith(b"data: {"):
            self._is_done = self._is_done or raw == b"data: [DONE]"
            return raw
        try:
            event = json.loads(raw[6:])
        except ValueError:
            event = {"error": "no event of this protocol"}
        if "error" in event:
            if reports_engine_death(raw.decode(errors="replace")):
                raise httpx.RemoteProtocolError("the engine died during an answer")
            self._is_known = False
            return raw
        is_first = self._first is None
        if self._first is None:
            self._first = {name: event.get(name) for name in ("id", "created")}
        event |= self._first
        prompt_ids = event.get("prompt_token_ids")
        if prompt_ids is not None:
            event["prompt_token_ids"] = None
        is_empty = not event.get("usage")
        for choice in event.get("choices") or ():
            prompt_ids = choice.get("prompt_token_ids") or prompt_ids
            is_empty = not self._take(choice) and is_empty
        if self._prompt_ids is None:
            self._prompt_ids = prompt_ids
        elif prompt_ids is not None and prompt_ids != [*self._prompt_ids, *self._ids[: self._num_ids_before]]:
            raise EngineDiedError(
                "the engine died during an answer, and its successor answered another prompt than what was said: ask "
                "again"
            )
        if usage := event.get("usage"):
            self._correct(usage)
        if is_empty and not is_first:
            return None
        return b"data: " + json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode()

    def _take(self, choice: dict[str, Any]) -> bool:
        """Note what a choice says, and leave out what was said before; return whether it is worth an event."""
        shown, name = (choice["delta"], "content") if "delta" in choice else (choice, "text")
        text: str = shown.get(name) or ""
        ids = choice.get("token_ids")
        self._ids += ids or ()
        others = [key for key, value in choice.get("delta", {}).items() if value and key not in ("role", "content")]
        is_finished = choice.get("finish_reason") is not None
        if self.is_sampled and self._num_ids_before and others:
            raise EngineDiedError(
                f"the engine died during an answer, and its successor continued with {others[0]} and not with text: "
                "ask again"
            )
        for hidden in ("token_ids", "prompt_token_ids"):
            if hidden in choice:
                choice[hidden] = None
        again, text = text[: len(self._replayed)], text[len(self._replayed) :]
        if not self._replayed.startswith(again) or (is_finished and len(again) < len(self._replayed)):
            if self._num_ids_before:
                self._marks = [_Mark(0, 0, 0)]
                raise httpx.RemoteProtocolError("the engine's successor did not go on with the same text")
            raise EngineDiedError(
                "the engine died during an answer, and its successor went on otherwise than it had begun: ask again"
            )
        self._has_finish_reason = self._has_finish_reason or is_finished
        self._replayed = self._replayed[len(again) :]
        self._text += text
        self._is_known = self._is_known and not others
        if again or text:
            self._is_known = self._is_known and ids is not None
            self._marks.append(_Mark(len(self._ids), len(self._text) - len(self._replayed), len(ids or ())))
        waits = self.is_sampled and self._is_known and not is_finished
        end = self._resumable_end() if waits else len(self._text)
        passed_on, self._num_passed_on = self._text[self._num_passed_on : end], end
        if passed_on or text or again:
            shown[name] = passed_on
        return bool(passed_on or others or choice.get("finish_reason"))

    def _correct(self, usage: dict[str, Any]) -> None:
        """Count what engines that died have said to the answer, and not to the prompt."""
        usage["prompt_tokens"] -= self._num_ids_before
        usage["completion_tokens"] += self._num_ids_before
        details = usage.get("prompt_tokens_details") or {}
        if details.get("cached_tokens"):
            details["cached_tokens"] = min(details["cached_tokens"], usage["prompt_tokens"])


async def _whole_characters(ids: list[int], decode: Decode) -> list[int] | None:
    """Return ``ids`` without the tokens of an unfinished character at their end; ``None`` if that is not known."""
    for end in range(len(ids), max(len(ids) - _CHARACTER_BYTES, 0), -1):
        text = await decode(ids[max(end - _DECODED_TOKENS, 0) : end])
        if text is None:
            return None
        if not text.endswith(_PARTIAL_CHARACTER):
            return ids[:end]
    return None


def can_resume(body: dict[str, Any], which: ResumeStreams = "all") -> bool:
    """Return whether the answer to a request for a completion can continue after a cut."""
    if which == "off" or (which == "greedy" and not _is_greedy(body)) or body.get("stream") is not True:
        return False
    prompt = body.get("prompt")
    if isinstance(prompt, list) and not all(isinstance(token, int) for token in prompt):
        return False  # several prompts
    options = body.get("stream_options") or {}
    if any(value for name, value in options.items() if name != "include_usage"):
        return False
    if not all(_is_text(message.get("content")) for message in body.get("messages") or ()):
        return False  # its token ids alone would not be its prompt
    ignored = {"stream_options", *(("tools",) if body.get("tool_choice") == "none" else ())}
    return all(
        value is None or name in _HARMLESS or name in ignored or _is_neutral(name, value)
        for name, value in body.items()
    )


def _is_greedy(body: dict[str, Any]) -> bool:
    """Return whether no answer to a request depends on a random state, as far as it says."""
    temperature = body.get("temperature")
    return isinstance(temperature, int | float) and 0 <= temperature < _GREEDY_BELOW


def _is_neutral(name: str, value: object) -> bool:
    neutral = _NEUTRAL.get(name, ...)
    return neutral == value and isinstance(neutral, bool) == isinstance(value, bool)  # "logprobs": 0 asks for some


def is_streamed(request: httpx.Request) -> bool:
    """Return whether ``request``, whose body was read, asks for its answer in pieces."""
    return b'"stream":true' in request.content or b'"stream": true' in request.content


def _is_text(content: object) -> bool:
    return not isinstance(content, list) or all(
        isinstance(part, str) or (isinstance(part, dict) and part.get("type") == "text") for part in content
    )


class ResumedAnswers:
    """The answers of one engine's handle that continued after an engine failure. May be used by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._resumes: dict[str, tuple[int, bool]] = {}

    def add(self, response_id: str, stream: ResumableStream) -> None:
        """Note that ``stream`` continued, until the statistics of its answer are read."""
        with self._lock:
            self._resumes[response_id] = stream.num_resumes, stream.is_sampled
            if len(self._resumes) > _MAX_ANSWERS:
                del self._resumes[next(iter(self._resumes))]

    def mark(self, response_id: str | None, stats: RequestStats) -> RequestStats:
        """Return ``stats`` with how the answer continued, if it did."""
        if not self._resumes or response_id is None:
            return stats
        with self._lock:
            num_resumes, is_sampled = self._resumes.pop(response_id, (0, False))
        return replace(stats, num_resumes=num_resumes, is_resampled=is_sampled)
