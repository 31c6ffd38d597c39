"""What :class:`tests.support.scripted_server.ScriptedServer` says: scripted answers, and rules."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

JsonObject = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Seen:
    """A request to ``/v1/chat/completions`` or ``/v1/completions`` as it arrived."""

    path: str
    body: JsonObject
    traceparent: str | None = None
    """Its trace, as W3C's trace context has it."""
    session: str | None = None
    """By which a proxy may choose who gets it."""
    authorization: str | None = None

    @property
    def messages(self) -> Sequence[JsonObject]:
        return self.body.get("messages") or [{"role": "user", "content": str(self.body.get("prompt", ""))}]

    @property
    def user_text(self) -> str:
        """The text of the last message of the user."""
        return next((text_of(m) for m in reversed(self.messages) if m["role"] == "user"), "")

    @property
    def kv_transfer_params(self) -> JsonObject:
        return self.body.get("kv_transfer_params") or {}

    @property
    def documents(self) -> Sequence[JsonObject]:
        """The document spans on the wire: ``{"id": ..., "start": ..., "end": ...}``."""
        documents: Sequence[JsonObject] = (self.kv_transfer_params.get("ragcache") or {}).get("documents", [])
        return documents

    @property
    def chunk_reuse(self) -> object:
        """What the request says of chunk reuse; ``None`` if nothing."""
        return (self.kv_transfer_params.get("ragcache") or {}).get("chunk_reuse")

    @property
    def speculation(self) -> str | None:
        """The id that marks the request as speculative."""
        return (self.kv_transfer_params.get("ragcache") or {}).get("speculation")


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer: text, or tool calls ``(name, arguments)``. Text is streamed a word at a time.

    ``wait_s`` passes before the first token and ``token_wait_s`` before each further one; both end at once when the
    client hangs up. ``cut_after_tokens`` closes the connection in the middle of the answer; ``error_after_tokens``
    sends an event with an error there, if the answer is streamed, and nothing of the text after it. ``finish_reason``
    replaces the one that follows from the request.
    """

    text: str = ""
    tool_calls: tuple[tuple[str, JsonObject], ...] = ()
    num_cached_tokens: int | None = None
    wait_s: float = 0.0
    token_wait_s: float = 0.0
    cut_after_tokens: int | None = None
    error_after_tokens: int | None = None
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error answer, before the first token."""

    status: int
    message: str
    kind: str = "BadRequestError"


ENGINE_DEAD = Refusal(
    500, "EngineCore encountered an issue. See stack trace (above) for the root cause.", "InternalServerError"
)
"""What vLLM answers once its EngineCore process has died."""

Rule = Callable[[Seen], "Reply | Refusal | None"]


def answer_like_a_model(request: Seen) -> Reply:
    """Do what a capable model would be asked to do, without understanding anything.

    Offered tools, it calls the forced one, or the first one, with arguments that fit the schema: numbers and quoted
    words come from the user's message in their order. After a tool's result it answers in text. Asked for JSON it
    answers with an instance of the schema. Otherwise it repeats the user.
    """
    body, said = request.body, _Answered(request.user_text)
    tools = {t["function"]["name"]: t["function"] for t in body.get("tools") or []}
    choice, last = body.get("tool_choice") or "auto", request.messages[-1]
    if tools and choice != "none" and not (last["role"] == "tool" and choice == "auto"):
        name = choice["function"]["name"] if isinstance(choice, Mapping) else next(iter(tools))
        return Reply(tool_calls=((name, said.instance_of(tools[name].get("parameters") or {})),))
    if last["role"] == "tool":
        return Reply(f"The tool said: {text_of(last)}")
    match body.get("response_format"):
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            return Reply(json.dumps(said.instance_of(schema)))
        case {"type": "json_object"}:
            return Reply(json.dumps({key: f"a {key}" for key in said.quoted or ["answer"]}))
    return Reply(f"You said: {request.user_text}")


class _Answered:
    """The user's words as a supply of values for a JSON schema."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.quoted = re.findall(r"['\"]([^'\"]+)['\"]", text)
        self._numbers = iter(re.findall(r"-?\d+", text))
        self._strings = iter(self.quoted)

    def instance_of(self, schema: JsonObject, root: JsonObject | None = None) -> Any:
        root = schema if root is None else root
        if reference := schema.get("$ref"):
            return self.instance_of(root["$defs"][reference.rpartition("/")[2]], root)
        if options := schema.get("anyOf") or schema.get("oneOf"):
            return self.instance_of(next(o for o in options if o.get("type") != "null"), root)
        if "const" in schema or "enum" in schema:
            return schema.get("const", next(iter(schema.get("enum", [])), None))
        match schema.get("type", "object" if "properties" in schema else "string"):
            case "object":
                return {name: self.instance_of(s, root) for name, s in (schema.get("properties") or {}).items()}
            case "array":
                return [self.instance_of(schema.get("items") or {}, root)]
            case "integer" | "number":
                return int(next(self._numbers, 0))
            case "boolean":
                return True
            case "null":
                return None
        return next(self._strings, self.text or "something")


def text_of(message: JsonObject) -> str:
    """Return the text of a message whose content is a string or a list of parts."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else " ".join(str(part.get("text", "")) for part in content)


def words_of(text: str) -> list[str]:
    """Return the words of a text with the space before them; together they are the text."""
    return re.findall(r"\s*\S+", text)


def prompt_tokens(request: Seen) -> tuple[object, ...]:
    """Return the token ids of a request where it holds them, else its words."""
    if (ids := request.kv_transfer_params.get("prompt_token_ids")) or isinstance(
        ids := request.body.get("prompt"), list
    ):
        return tuple(ids)
    text = " ".join(f"{m['role']}: {text_of(m) or json.dumps(m.get('tool_calls'))}" for m in request.messages)
    return tuple(words_of(f"{json.dumps(request.body['tools'])} {text}" if request.body.get("tools") else text))


def token_ids(tokens: Sequence[object]) -> list[int]:
    """Return the ids of words; what is an id already stays one."""
    return [token if isinstance(token, int) else zlib.crc32(str(token).encode()) for token in tokens]


def rest_of(text: str) -> Rule:
    """Return a rule that says ``text``, or what is missing of it where the prompt ends with its beginning."""
    words = words_of(text)
    ids = token_ids(words)

    def rule(request: Seen) -> Reply:
        prompt = list(prompt_tokens(request))
        said = next((n for n in range(len(ids), 0, -1) if prompt[-n:] == ids[:n]), 0)
        return Reply("".join(words[said:]))

    return rule


def cut_to_request(pieces: list[str], body: JsonObject) -> tuple[list[str], str]:
    """Return the words up to a stop sequence and ``max_tokens``, and the finish reason."""
    stops = [body["stop"]] if isinstance(body.get("stop"), str) else body.get("stop") or []
    text = "".join(pieces)
    for stop in stops:
        text = text.partition(stop)[0]
    kept, limit = words_of(text), body.get("max_tokens") or body.get("max_completion_tokens")
    return (kept[:limit], "length") if limit and len(kept) > limit else (kept, "stop")
