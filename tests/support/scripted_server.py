"""A small real HTTP server that speaks vLLM's protocol and answers by rules: a fake for everything above the wire.

::

    with ScriptedServer(api_key="secret") as server:          # loopback, a free port, its own threads
        server.script(Reply("Paris"), ENGINE_DEAD)            # the next two answers; then the rules decide again
        engine = Engine.connect(server.url, api_key="secret")
        ...
        server.requests[-1].body["kv_transfer_params"]        # what the client really sent
        server.num_running                                    # falls to 0 soon after a client hangs up

Each answer comes from the first of: the script (in order), the rules given (the first that returns something),
:func:`answer_like_a_model`. The server itself answers 401 to a wrong key, 404 to an unknown model and 400 to a prompt
that is too long, with vLLM's words. It counts a word as a token, and keeps a prefix cache: ``cached_tokens`` of a
prompt is what it shares with an earlier one, in whole blocks.

It is plain vLLM until ``cache`` is set, to :data:`THREE_TIERS` for example; then it has RAGCache's routes as well. With
the folder of a model as its ``root``, it knows the tokens of chats and finds their documents.
"""

from __future__ import annotations

import contextlib
import json
import re
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count, takewhile
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qsl, urlsplit

from ragcache_core.errors import PromptError
from ragcache_core.prompt import PromptDocument
from ragcache_core.types import SegmentKind
from ragcache_core.wire import DEFAULTS_HEADER, HUNG, REPLICA_HEADER, SESSION_HEADER
from tests.support.local_tokenizer import LocalTokenizer
from tests.support.scripted_answers import (
    ENGINE_DEAD,
    JsonObject,
    Refusal,
    Reply,
    Rule,
    Seen,
    answer_like_a_model,
    cut_to_request,
    prompt_tokens,
    rest_of,
    text_of,
    token_ids,
    words_of,
)

__all__ = [
    "ENGINE_DEAD",
    "IDLE",
    "THREE_TIERS",
    "Refusal",
    "Reply",
    "Rule",
    "ScriptedServer",
    "Seen",
    "answer_like_a_model",
    "rest_of",
    "text_of",
]

_CONFIRM = re.compile(r"/v1/ragcache/speculations/([^/]+)/confirm")
_WAIT = re.compile(r"/v1/ragcache/speculations/([^/?]+)\?after=(\d+)")
_TIMEOUT_S = 0.5
BLOCK_SIZE = 16
BYTES_PER_TOKEN = 1024
THREE_TIERS: JsonObject = {
    "policy": "mixture", "num_ignored_metadata": 1,
    "num_corrupt_blocks": 2, "num_lost_blocks": 3, "num_dropped_blocks": 4,
    "tiers": [
        {"name": "gpu", "capacity_bytes": 1 << 30, "used_bytes": 1 << 29, "num_blocks": 512, "num_evicted_blocks": 9,
         "num_hit_tokens": 4096, "is_enabled": True, "num_corrupt_blocks": 0, "num_dropped_blocks": 0},
        {"name": "host", "capacity_bytes": 8 << 30, "used_bytes": 6 << 30, "num_blocks": 6144, "num_evicted_blocks": 4,
         "num_hit_tokens": 2048, "is_enabled": True, "num_corrupt_blocks": 0, "num_dropped_blocks": 0},
        {"name": "disk", "capacity_bytes": 1 << 40, "used_bytes": 0, "num_blocks": 0, "num_evicted_blocks": 0,
         "num_hit_tokens": 0, "is_enabled": False, "num_corrupt_blocks": 2, "num_dropped_blocks": 4},
    ],
    "hottest_documents": [
        {"doc_id": "mel.txt", "frequency": 12.5, "num_tokens": 300, "tiers": ["gpu", "host"]},
        {"doc_id": "zor.md", "frequency": 3, "num_tokens": 1200, "tiers": ["disk"]},
    ],
}  # fmt: skip
"""What an engine with three tiers, whose disk failed, says of its cache."""
IDLE: JsonObject = {"num_pending_prefills": 0, "max_prefill_bs": 4, "is_speculative": True, "has_room": True}
"""What an engine with nothing to do says of its load."""


@dataclass
class ScriptedServer:
    """A server of vLLM's protocol on loopback; a context manager that owns its port and its threads.

    Set ``rules``, ``is_healthy`` or ``max_model_len`` at any time. ``root`` is where ``/v1/models`` says that the
    model lies; its tokenizer is the server's, if it is a folder (``"examples/demo_model"``).
    """

    rules: Sequence[Rule] = ()
    model: str = "scripted-model"
    adapters: Sequence[str] = ()
    name: str = ""
    """What it calls itself to proxies, where it has a name."""
    root: str = "scripted-model"
    api_key: str | None = None
    max_model_len: int = 2048
    is_healthy: bool = True
    hang: str | None = None
    """Why ``/health`` says that the engine hangs."""
    health_wait_s: float = 0.0
    """Seconds before ``/health`` answers."""
    requests: list[Seen] = field(default_factory=list)
    cache: JsonObject | None = None
    """What ``/v1/ragcache/stats`` answers; ``None`` is plain vLLM, which has no such route."""
    reuse: JsonObject | None = None
    """What RAGCache's routes say of chunk reuse in every request; ``None`` is nothing."""
    cache_status: int = 200
    """The status of RAGCache's routes; other than 200 they answer with nothing but it."""
    cache_wait_s: float = 0.0
    """Seconds before RAGCache's routes answer."""
    cache_questions: list[str] = field(default_factory=list)
    """What RAGCache's routes were asked, whether or not they are there: paths without ``/v1/ragcache/``."""
    load: JsonObject | None = None
    """What ``/v1/ragcache/load`` answers, to :data:`IDLE` for example; with ``None`` there is no speculation."""
    costs: JsonObject | None = None
    """What ``/v1/ragcache/costs`` answers; with ``None`` there is no route."""
    cached_paths: JsonObject | None = None
    """What ``/v1/ragcache/cached_paths`` answers, whatever was answered before; with ``None`` there is no route."""
    tokenizer: LocalTokenizer | None = None
    """Its tokenizer; by default that of ``root``."""
    epoch: str | None = None
    """What names its registered documents."""
    finds_documents: bool = True
    """Whether it finds documents in prompts, as a server of RAGCache with a tokenizer does."""
    names_documents: bool = True
    """Whether it finds them in requests, too."""
    laid_out: list[JsonObject] = field(default_factory=list)
    """The bodies of chats whose tokens it was asked for."""
    receipt: JsonObject | None = None
    """What it answers when documents are to be forgotten; ``None`` is a server without RAGCache."""
    cache_answers: dict[str, JsonObject | str] = field(default_factory=dict)
    """What it answers on routes of the cache's contents, ``cache`` or ``documents/pin``; a text refuses with that."""
    cache_requests: list[tuple[str, JsonObject]] = field(default_factory=list)
    """What these were asked, by body or query."""
    forgotten: list[list[str]] = field(default_factory=list)
    """The ids that were to be forgotten, by request."""
    confirmed: list[str] = field(default_factory=list)
    """Ids of the speculations that were confirmed."""
    admits_after_s: float | None = 0.0
    """Seconds before a speculation is begun with, as far as it says; ``None`` says nothing of it."""
    paused_s: list[float] = field(default_factory=list)
    """Seconds of each pause of a speculation that it tells of afterwards."""
    prefetched: list[JsonObject] = field(default_factory=list)
    """What it was asked to read from disk."""
    num_read_tokens: int = 0
    """What it says then."""
    names_tokens: bool = False
    """Whether a stream names its tokens to who asks for them, as vLLM does; see ``rest_of``."""
    defaults: str = "{}"
    """What such a stream says that the server adds to requests."""
    port: int = 0
    """Where to listen; 0 is a free one."""
    host: str = "127.0.0.1"
    aborted: list[Seen] = field(default_factory=list)
    """Requests whose client hung up before the end."""

    def __post_init__(self) -> None:
        if self.tokenizer is None and (Path(self.root) / "tokenizer.json").is_file():
            self.tokenizer = LocalTokenizer.of_model(self.root)
        self._script: deque[Reply | Refusal] = deque()
        self._prompts: deque[tuple[object, ...]] = deque(maxlen=256)
        self._figures: dict[str, JsonObject] = {}
        self._arrived_s: dict[str, float] = {}
        self._lock = threading.Lock()
        self._ids = count(1)
        self._running: set[int] = set()
        self._connections: set[socket.socket] = set()
        self.counters = dict.fromkeys(("prompt", "output", "query", "hit", "first", "ttft_ms"), 0)
        self._http = ThreadingHTTPServer(
            (self.host, self.port), type("_BoundHandler", (_Handler,), {"server_of": self})
        )
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), name="scripted-server")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()
        for connection in tuple(self._connections):
            _shut(connection)

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self._http.server_address[1]}"

    @property
    def base_url(self) -> str:
        """``url`` with the ``/v1`` that OpenAI's clients want."""
        return f"{self.url}/v1"

    @property
    def num_running(self) -> int:
        return len(self._running)

    def script(self, *answers: Reply | Refusal) -> None:
        """Give the next answers, in order, whatever is asked."""
        self._script.extend(answers)

    def clear(self) -> None:
        """Forget requests, script and prompts, so that the next prompt is cold."""
        with self._lock:
            self.requests.clear()
            self.cache_questions.clear()
            self.laid_out.clear()
            self.confirmed.clear()
            self.aborted.clear()
            self._script.clear()
            self._prompts.clear()

    def _answer(self, request: Seen) -> Reply | Refusal:
        with self._lock:
            self.requests.append(request)
            if isinstance(request.speculation, str):
                self._arrived_s[request.speculation] = time.monotonic()
            if request.body.get("model") not in (None, self.model, *self.adapters):
                message = f"The model `{request.body['model']}` does not exist."
                return Refusal(404, message, "NotFoundError")
            asked = len(self._prompt(request)[0]) + (request.body.get("max_tokens") or 1)
            if asked > self.max_model_len:
                return Refusal(
                    400,
                    f"This model's maximum context length is {self.max_model_len} tokens. However, your request asks "
                    f"for {asked} tokens. Please reduce the length of the input prompt.",
                )
            if self._script:
                return self._script.popleft()
        return next((a for rule in self.rules if (a := rule(request))), None) or answer_like_a_model(request)

    def _usage(self, request: Seen, reply: Reply, num_output_tokens: int, response_id: str) -> dict[str, Any]:
        tokens, spans = self._prompt(request)
        with self._lock:
            shared = max((sum(1 for _ in takewhile(lambda p: p[0] == p[1], zip(tokens, seen, strict=False)))
                          for seen in self._prompts), default=0)  # fmt: skip
            self._prompts.append(tokens)
            cached = min(shared, len(tokens) - 1) // BLOCK_SIZE * BLOCK_SIZE
            cached = cached if reply.num_cached_tokens is None else reply.num_cached_tokens
            added = {
                "prompt": len(tokens),
                "output": num_output_tokens,
                "query": len(tokens),
                "hit": cached,
                "first": 1,
                "ttft_ms": 2,
            }
            self.counters = {key: value + added[key] for key, value in self.counters.items()}
            host = disk = cached // 4
            self._figures[response_id] = {
                "num_gpu_tokens": cached - host - disk, "num_host_tokens": host, "num_disk_tokens": disk,
                "num_loaded_bytes": (host + disk) * BYTES_PER_TOKEN,
                "num_stored_bytes": (len(tokens) - cached) * BYTES_PER_TOKEN, "queue_s": 0.001, "ttft_s": 0.002,
                "num_prompt_tokens": len(tokens), "documents": spans,
                **({} if self.epoch is None else {"epoch": self.epoch}),
                **({} if self.reuse is None else {"chunk_reuse": self.reuse}),
            }  # fmt: skip
        return {
            "prompt_tokens": len(tokens),
            "completion_tokens": num_output_tokens,
            "total_tokens": len(tokens) + num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": cached} if cached else None,
        }

    def _prompt(self, request: Seen) -> tuple[tuple[object, ...], list[JsonObject]]:
        """Return the tokens of a request, and the documents that are named in it."""
        tokens, named = prompt_tokens(request), list(request.documents)
        has_tokens = "prompt" in request.body or "prompt_token_ids" in request.kv_transfer_params
        if self.tokenizer is None or not self.finds_documents or not self.names_documents or has_tokens:
            return tokens, [document for document in named if "start" in document]
        laid_out = self._laid_out({**request.body, "documents": [each for each in named if "text" in each]})
        return (tokens, []) if laid_out is None else (tuple(laid_out["token_ids"]), laid_out["documents"])

    def tokens_of(self, request: Seen) -> list[Any]:
        """Return the tokens of a request as the server makes them."""
        return list(self._prompt(request)[0])

    def _laid_out(self, body: JsonObject) -> dict[str, Any] | None:
        """Return what ``/v1/ragcache/prompt`` answers; ``None`` for what no template renders."""
        assert self.tokenizer is not None
        shown = [PromptDocument(d["id"], d["text"], d.get("skip", 0)) for d in body.get("documents", ())]
        try:
            prompt = self.tokenizer.lay_out(body["messages"], shown, other=body.get("other"), settings=body)
        except PromptError:
            return None
        spans = [
            {"id": segment.doc_id, "start": segment.start, "end": segment.text_end}
            for segment in prompt.segments
            if segment.kind is SegmentKind.DOCUMENT
        ]
        return {"token_ids": list(prompt.token_ids), "documents": spans}

    def _cache_answer(self, question: str) -> JsonObject | None:
        """Return what a route of RAGCache's says; ``None`` where it does not know."""
        self.cache_questions.append(question)
        if question == "load":
            return self.load
        if question == "costs":
            return self.costs
        if self.cache is None:
            return None
        return self.cache if question == "stats" else self._figures.get(question.removeprefix("requests/"))

    def _wait(self, speculation: str, *, after: int) -> JsonObject:
        """Return how long a speculation has waited, and how often that was told; until ``after`` times it waits."""
        deadline_s = time.monotonic() + _TIMEOUT_S
        while (now_s := time.monotonic()) < deadline_s:
            arrived_s, after_s, pauses_s = self._arrived_s.get(speculation), self.admits_after_s, self.paused_s[:]
            has_news = arrived_s is not None and len(pauses_s) >= after
            if has_news and after_s is not None and now_s >= arrived_s + after_s:
                return {"waited_s": after_s + sum(pauses_s), "num_reports": len(pauses_s) + 1}
            time.sleep(0.005)
        return {"waited_s": None, "num_reports": after}

    def _metrics(self) -> str:
        values = {
            "num_requests_running": len(self._running), "num_requests_waiting": 0, "kv_cache_usage_perc": 0.0,
            "prompt_tokens_total": self.counters["prompt"], "generation_tokens_total": self.counters["output"],
            "prefix_cache_queries_total": self.counters["query"], "prefix_cache_hits_total": self.counters["hit"],
            "num_preemptions_total": 0,
            "time_to_first_token_seconds_count": self.counters["first"],
            "time_to_first_token_seconds_sum": self.counters["ttft_ms"] / 1000,
        }  # fmt: skip
        memory = f'vllm:cache_config_info{{block_size="{BLOCK_SIZE}",num_gpu_blocks="1025"}} 1.0\n'
        return memory + "".join(
            f'vllm:{k}{{engine="0",model_name="{self.model}"}} {float(v)}\n' for k, v in values.items()
        )


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class _HungUpError(Exception):
    """The client closed the connection."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server_of: ScriptedServer

    def setup(self) -> None:
        super().setup()
        self.server_of._connections.add(self.connection)

    def finish(self) -> None:
        self.server_of._connections.discard(self.connection)
        super().finish()

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):
            super().handle()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        owner = self.server_of
        card = {"id": owner.model, "object": "model", "owned_by": "vllm", "root": owner.root, "parent": None,
                "max_model_len": owner.max_model_len}  # fmt: skip
        match self.path:
            case "/health" | "/ping" | "/ready":
                self._wait(owner.health_wait_s)
                error = {"message": owner.hang, "type": HUNG, "param": None, "code": 503}
                if owner.hang is not None:
                    self._send(503, {"error": error})
                else:
                    self._send(200 if owner.is_healthy else 503, "")
            case "/version":
                self._send(200, {"version": "0.32.0"})
            case "/metrics" | "/metrics/":
                self._send(200, owner._metrics())
            case "/v1/models":
                if self._is_allowed():
                    self._send(200, {"object": "list", "data": [card]})
            case path if (found := _WAIT.fullmatch(path)) and self.server_of.load is not None:
                if self._is_allowed():
                    with contextlib.suppress(OSError):
                        self._send(owner.cache_status, owner._wait(found[1], after=int(found[2])))
            case path if path.startswith("/v1/ragcache/cached_paths") and owner.cached_paths is not None:
                if self._is_allowed():
                    self._send(200, owner.cached_paths)
            case "/v1/ragcache/tokenizer" if owner.tokenizer is not None and owner.finds_documents:
                if self._is_allowed():
                    control = sorted(owner.tokenizer.control_tokens)
                    self._send(200, {"identity": owner.tokenizer.identity, "control_tokens": control,
                                     "finds_documents": True, "names_documents": owner.names_documents})  # fmt: skip
            case path if path.startswith("/v1/ragcache/cache?"):
                if self._is_allowed():
                    self._act_on_cache("cache", dict(parse_qsl(urlsplit(path).query)))
            case path if path.startswith("/v1/ragcache/"):
                if self._is_allowed():
                    self._answer_of_the_cache(path.removeprefix("/v1/ragcache/"))
            case _:
                self._send(404, {"detail": "Not Found"})

    def _act_on_cache(self, action: str, asked: JsonObject) -> None:
        self.server_of.cache_requests.append((action, asked))
        answer = self.server_of.cache_answers[action]
        if isinstance(answer, str):
            self._send(409, {"error": {"message": answer, "code": 409}})
        else:
            self._send(200, answer)

    def _answer_of_the_cache(self, question: str) -> None:
        owner = self.server_of
        answer = owner._cache_answer(question)
        with contextlib.suppress(_HungUpError, OSError):
            self._wait(owner.cache_wait_s)
            if answer is None or owner.cache_status != 200:
                self._send(404 if answer is None else owner.cache_status, {"detail": "Not Found"})
            else:
                self._send(200, answer)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
        if not self._is_allowed():
            return
        session = self.headers.get(SESSION_HEADER)
        headers = self.headers.get("traceparent"), session, self.headers.get("Authorization")
        request, owner = Seen(self.path, body, *headers), self.server_of
        if self.path in ("/v1/chat/completions", "/v1/completions"):
            request_id = next(owner._ids)
            owner._running.add(request_id)
            try:
                self._complete(request, request_id)
            except (_HungUpError, OSError):
                owner.aborted.append(request)
                self.close_connection = True
            finally:
                owner._running.discard(request_id)
        elif self.path in ("/tokenize", "/v1/ragcache/prompt") and owner.tokenizer is not None:
            if "prompt" in body:
                encoded = owner.tokenizer.encode(body["prompt"], add_special_tokens=body["add_special_tokens"])
                self._send(200, {"tokens": list(encoded.token_ids)})
                return
            owner.laid_out.append(body)
            answer = owner._laid_out(body)
            told = None if answer is None else answer if self.path != "/tokenize" else {"tokens": answer["token_ids"]}
            self._send(400 if told is None else 200, {} if told is None else told)
        elif self.path == "/detokenize" and owner.tokenizer is not None:
            self._send(200, {"prompt": owner.tokenizer.decode(body["tokens"])})
        elif (found := _CONFIRM.fullmatch(self.path)) and owner.load is not None:
            owner.cache_questions.append(self.path.removeprefix("/v1/ragcache/"))
            if owner.cache_status == 200:
                owner.confirmed.append(found[1])
            self._send(204 if owner.cache_status == 200 else owner.cache_status, "")
        elif self.path == "/v1/ragcache/documents/forget" and owner.receipt is not None:
            owner.forgotten.append(body["ids"])
            self._send(200, owner.receipt)
        elif (action := self.path.removeprefix("/v1/ragcache/")) in owner.cache_answers:
            self._act_on_cache(action, body)
        elif self.path == "/v1/ragcache/prefetch" and owner.cache is not None:
            owner.prefetched.append(body)
            self._send(200, {"num_read_tokens": owner.num_read_tokens})
        elif self.path == "/v1/ragcache/drain" and owner.cache is not None:
            self._send(200, {"num_running": len(owner._running)})
        else:
            self._send(404, {"detail": "Not Found"})

    def _is_allowed(self) -> bool:
        key = self.server_of.api_key
        allowed = key is None or not self.path.startswith("/v1") or self.headers.get("Authorization") == f"Bearer {key}"
        if not allowed:
            self._send(401, {"error": "Unauthorized"})
        return allowed

    def _complete(self, request: Seen, request_id: int) -> None:
        answer = self.server_of._answer(request)
        if isinstance(answer, Refusal):
            error = {"message": answer.message, "type": answer.kind, "param": None, "code": answer.status}
            self._send(answer.status, {"error": error})
            return
        n = request.body.get("n") or 1  # the answers are equal
        pieces, finish_reason = cut_to_request(words_of(answer.text), request.body)
        calls = [{"id": f"call-{request_id}-{i}", "type": "function",
                  "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}}
                 for i, (name, arguments) in enumerate(answer.tool_calls)]  # fmt: skip
        finish_reason = answer.finish_reason or ("tool_calls" if calls else finish_reason)
        is_chat = self.path == "/v1/chat/completions"
        response_id = f"{'chatcmpl' if is_chat else 'cmpl'}-{self.server_of.name}{request_id}"
        num_output_tokens = len(pieces) + sum(len(c["function"]) for c in calls)
        usage = self.server_of._usage(request, answer, num_output_tokens, response_id)
        head = {"id": response_id, "created": int(time.time()), "model": self.server_of.model}
        self._wait(answer.wait_s)
        if not request.body.get("stream"):
            if answer.cut_after_tokens is not None:
                raise _HungUpError
            for _ in pieces[1:]:
                self._wait(answer.token_wait_s)
            text = "".join(pieces)
            message = {"role": "assistant", "content": text if text or not calls else None, "tool_calls": calls}
            shown: dict[str, Any] = {"message": message} if is_chat else {"text": text}
            choices = [{"index": i, **shown, "logprobs": None, "finish_reason": finish_reason} for i in range(n)]
            kind = "chat.completion" if is_chat else "text_completion"
            self._send(200, {**head, "object": kind, "choices": choices, "usage": usage, "kv_transfer_params": None})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header(REPLICA_HEADER, self.server_of.name or "scripted")
        self.send_header("Transfer-Encoding", "chunked")
        if self.server_of.names_tokens:
            self.send_header(DEFAULTS_HEADER, self.server_of.defaults)
        self.end_headers()
        names_tokens = self.server_of.names_tokens and request.body.get("return_token_ids")
        prompt_ids = {"prompt_token_ids": token_ids(prompt_tokens(request))} if names_tokens else {}
        for i, delta in enumerate(_deltas(pieces, calls, is_chat)):
            if answer.cut_after_tokens is not None and i > answer.cut_after_tokens:
                _shut(self.connection)
                raise _HungUpError
            if answer.error_after_tokens is not None and i > answer.error_after_tokens:
                self._chunk(b'data: {"error": {"message": "out of room", "type": "ServerError", "code": 500}}\n\n')
                break
            self._wait(answer.token_wait_s if i else 0.0)
            said = delta.get("text") or delta.get("delta", {}).get("content")
            ids = {"token_ids": token_ids([said])} if names_tokens and said else {}
            for index in range(n):
                choice = {"index": index, **delta, "finish_reason": None, **ids}
                self._event({**head, **({} if i else prompt_ids), "choices": [choice]}, is_chat)
        last: JsonObject = {"delta": {}} if is_chat else {"text": ""}
        for index in range(n):
            self._event({**head, "choices": [{"index": index, **last, "finish_reason": finish_reason}]}, is_chat)
        if (request.body.get("stream_options") or {}).get("include_usage"):
            self._event({**head, "choices": [], "usage": usage}, is_chat)
        self._chunk(b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _event(self, event: JsonObject, is_chat: bool) -> None:
        kind = "chat.completion.chunk" if is_chat else "text_completion"
        self._chunk(f"data: {json.dumps({**event, 'object': kind})}\n\n".encode())

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))

    def _wait(self, seconds: float) -> None:
        """Pass the time unless the client hangs up."""
        readable, _, _ = select.select([self.connection], [], [], seconds)
        if readable and not self.connection.recv(1, socket.MSG_PEEK):
            raise _HungUpError

    def _send(self, status: int, body: JsonObject | str) -> None:
        data = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        self.send_header(REPLICA_HEADER, self.server_of.name or "scripted")
        self.send_header("Content-Type", "text/plain" if isinstance(body, str) else "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _deltas(pieces: Sequence[str], calls: Sequence[JsonObject], is_chat: bool) -> Iterator[JsonObject]:
    if not is_chat:
        yield from ({"text": piece} for piece in pieces)
        return
    yield {"delta": {"role": "assistant", "content": ""}}
    yield from ({"delta": {"content": piece}} for piece in pieces)
    for i, call in enumerate(calls):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        opening = {"id": call["id"], "type": "function", "index": i, "function": {"name": name, "arguments": ""}}
        yield {"delta": {"tool_calls": [opening]}}
        for part in (arguments[: len(arguments) // 2], arguments[len(arguments) // 2 :]):
            yield {"delta": {"tool_calls": [{"index": i, "function": {"arguments": part}}]}}
