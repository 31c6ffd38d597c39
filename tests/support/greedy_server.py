"""What vLLM's server streams of one greedy answer, byte for byte, wherever the prompt already holds a part of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

PROMPT = [1, 2, 3]


@dataclass(frozen=True)
class GreedyServer:
    """vLLM's server over a model that says ``tokens`` after ``PROMPT``, ``interval`` of them in an event.

    The id of a token is its place. Its text is withheld as vLLM withholds it: as much as could begin a stop string.
    No answer goes on after a token that is one of the ``parts`` of a character, whose text comes with the next one:
    vLLM begins with other text then. ``limit`` is the most tokens of a chat's answer that says no other; where it
    ``is_strict``, of any.
    """

    tokens: tuple[str, ...]
    interval: int = 1
    limit: int | None = None
    is_strict: bool = False
    parts: frozenset[int] = frozenset()

    def answer(self, body: dict[str, Any]) -> bytes:
        """Return the whole answer to a request, as bytes of its stream."""
        is_chat = "messages" in body
        ids = body["kv_transfer_params"]["prompt_token_ids"] if is_chat and "kv_transfer_params" in body else PROMPT
        ids = ids if is_chat else body["prompt"]
        place = len(ids) - len(PROMPT)
        assert ids == [*PROMPT, *range(100, 100 + place)]
        stops, keeps = body.get("stop", []), body.get("include_stop_str_in_output", False)
        held = 0 if keeps or not stops else max(map(len, stops)) - 1
        server_limit = 10**6 if self.limit is None else self.limit
        limit = body.get("max_tokens", server_limit if is_chat else 16)
        limit = min(limit, server_limit) if self.is_strict else limit
        assert limit > 0
        text, sent, unsent, num, reason = "", 0, [], 0, None
        garbage = "the prompt " if place and place - 1 in self.parts else ""
        events: list[dict[str, Any]] = [self._choice("", [], None, is_chat, role="assistant")] if is_chat else []
        while reason is None:
            if place == len(self.tokens):
                reason, token, token_id = "stop", "", 2
            else:
                token, token_id = garbage + self.tokens[place], 100 + place
                garbage = "" if self.tokens[place] else garbage
            checked, text, place, num = len(text), text + token, place + 1, num + 1
            unsent.append(token_id)
            for stop in stops:
                at = text.find(stop, max(checked - len(stop) + 1, 0))
                if reason is None and at >= 0:
                    text, reason = text[: at + len(stop) if keeps else at], "stop"
            if reason is None and num == limit:
                reason = "length"
            if reason is not None or num % self.interval == 0:
                end = len(text) if reason is not None else max(len(text) - held, sent)
                events.append(self._choice(text[sent:end], unsent, reason, is_chat))
                sent, unsent = end, []
        if is_chat:
            events[0]["prompt_token_ids"] = ids
        else:
            events[0]["choices"][0]["prompt_token_ids"] = ids
        usage = {"prompt_tokens": len(ids), "completion_tokens": num, "total_tokens": len(ids) + num}
        events.append({"choices": [], "usage": {**usage, "prompt_tokens_details": {"cached_tokens": len(ids) - 1}}})
        head = {"id": f"{'chatcmpl' if is_chat else 'cmpl'}-{body.get('request_id', 'first')}", "created": len(ids)}
        lines = [f"data: {json.dumps({**head, **event}, ensure_ascii=False)}\n\n" for event in events]
        return "".join([*lines, "data: [DONE]\n\n"]).encode()

    def _choice(self, text: str, ids: list[int], reason: str | None, is_chat: bool, **more: Any) -> dict[str, Any]:
        said = {"delta": {"content": text, **more}} if is_chat else {"text": text}
        return {"choices": [{"index": 0, **said, "finish_reason": reason, **({} if more else {"token_ids": ids})}]}
