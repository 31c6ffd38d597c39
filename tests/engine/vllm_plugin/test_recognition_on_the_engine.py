"""Plain clients of a real engine: answers as by plain vLLM over all tiers, and all that documents by name bring.

One engine of this module's own, with tiers so small that a few prompts go through all of them. The last test restarts
it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from ragcache_core import CacheConfig, PromptLayout
from ragcache_core.client import Engine
from ragcache_core.config import ChunkReuse
from ragcache_core.types import Document
from tests.conftest import DEMO_MODEL, ENGINE_ARGS

BLOCK, BLOCK_BYTES = 32, 128 << 10
NUM_DOCUMENTS = 24
WORDS = ("Zorval", "Tenrik", "was", "a", "company", "founded", "by", "Anna", "Boris", "in", "1823", "makes", "clocks")
KEY = "plain-client-key"


def text_of(number: int, num_words: int = 90) -> str:
    return " ".join(Random(number).choices(WORDS, k=num_words)) + f" number {number}."


DOCUMENTS = {f"doc-{i}": text_of(i) for i in range(NUM_DOCUMENTS)}


def settings(folder: Path) -> dict[str, Any]:
    cache = CacheConfig(
        kv_cache_bytes=72 * BLOCK_BYTES,
        block_size=BLOCK,
        host_bytes=32 * BLOCK_BYTES,
        disk_bytes="64MiB",
        directory=folder / "kv",
    )
    return {**ENGINE_ARGS, "cache": cache, "api_key": KEY, "log_path": folder / "server.log"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recognition")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with Engine.launch(str(DEMO_MODEL), **settings(folder)) as running:
        yield running


class PlainClient:
    """Any client of the OpenAI protocol."""

    def __init__(self, engine: Engine, key: str = "none") -> None:
        self._http = httpx.Client(
            base_url=engine.base_url, headers={"Authorization": f"Bearer {key}"}, timeout=120, trust_env=False
        )
        self.model = self.get("/models")["data"][0]["id"]

    def get(self, path: str) -> dict[str, Any]:
        answer: dict[str, Any] = self._http.get(path).raise_for_status().json()
        return answer

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        answer: dict[str, Any] = self._http.post(path, json=body).raise_for_status().json()
        return answer

    def chat(self, content: str, **body: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": content}]
        body = {"max_tokens": 6, "temperature": 0, **body}
        return self.post("/chat/completions", model=self.model, messages=messages, **body)

    def on_documents(self, action: str, ids: list[str]) -> dict[str, Any]:
        return self.post(f"/ragcache/documents/{action}", ids=ids)

    def recognition(self) -> dict[str, int]:
        figures: dict[str, int] = self.get("/ragcache/stats")["recognition"]
        return figures


@pytest.fixture(scope="module")
def client(engine: Engine) -> PlainClient:
    """A client of the engine, which has registered all documents."""
    client = PlainClient(engine, KEY)
    register(client, DOCUMENTS)
    return client


def register(client: PlainClient, texts: dict[str, str], acl: list[str] | None = None) -> None:
    rights = {} if acl is None else {"acl": acl}
    documents = [{"id": doc_id, "text": text, **rights} for doc_id, text in texts.items()]
    assert client.post("/ragcache/documents/register", documents=documents)["num_registered"] == len(texts)


def prompt_of(rng: Random) -> str:
    shown = [DOCUMENTS[doc_id] for doc_id in rng.sample(list(DOCUMENTS)[:10], rng.randint(1, 3))]
    if rng.random() < 0.3:
        shown[0] = shown[0].replace("company", "firm")  # altered
    question = rng.choice(["Who founded Zorval?", "What does Tenrik make?", "When was it?"])
    return "\n\n".join([*shown, question])


def answers(client: PlainClient, rng: Random) -> list[object]:
    """Send one of the kinds of requests, and return what it says."""
    prompt = prompt_of(rng)
    match rng.randint(0, 4):
        case 0:
            return [client.chat(prompt)["choices"][0]["message"]["content"]]
        case 1:
            body = {"model": client.model, "prompt": [prompt, prompt_of(rng)], "max_tokens": 6, "temperature": 0}
            return [choice["text"] for choice in client.post("/completions", **body)["choices"]]
        case 2:
            root = str(client._http.base_url).removesuffix("/").removesuffix("/v1")
            asked = {"model": client.model, "prompt": prompt}
            tokens = client._http.post(f"{root}/tokenize", json=asked).raise_for_status().json()["tokens"]
            body = {"model": client.model, "prompt": tokens, "max_tokens": 6, "temperature": 0}
            return [client.post("/completions", **body)["choices"][0]["text"]]
        case 3:
            body = {"model": client.model, "input": prompt, "max_output_tokens": 6, "temperature": 0}
            return [client.post("/responses", **body)["output"][-1]["content"]]
        case _:
            streamed = client._http.post(
                "/chat/completions",
                json={
                    "model": client.model,
                    "messages": [{"role": "user", "content": prompt}],
                    "max_tokens": 6,
                    "temperature": 0,
                    "stream": True,
                },
            )
            assert "ragcache" not in streamed.text
            lines = [line for line in streamed.text.splitlines() if line.startswith("data: {")]
            events = [json.loads(line.removeprefix("data: ")) for line in lines]
            deltas = [choice["delta"] for event in events for choice in event["choices"]]
            return ["".join(delta.get("content") or "" for delta in deltas)]


@pytest.mark.parametrize("num_requests", [60, pytest.param(500, marks=pytest.mark.slow)])
def test_mixed_requests_of_plain_clients_are_answered_as_by_plain_vllm(
    num_requests: int, client: PlainClient, plain: Engine
) -> None:
    other = PlainClient(plain, plain.api_key)
    for seed in range(num_requests):
        said = [_without_ids(each) for each in answers(client, Random(seed))]
        assert said == [_without_ids(each) for each in answers(other, Random(seed))], seed
    figures = client.recognition()
    assert figures["num_recognised"] > num_requests / 2
    assert figures["num_documents"] == NUM_DOCUMENTS
    tiers = {tier["name"]: tier for tier in client.get("/ragcache/stats")["tiers"]}
    assert tiers["disk"]["num_hit_tokens"] + tiers["host"]["num_hit_tokens"] > 0


def _without_ids(said: object) -> object:
    if isinstance(said, list):
        return [{name: value for name, value in part.items() if name in ("type", "text")} for part in said]
    return said


def test_a_plain_client_has_hits_names_and_pins_by_document(client: PlainClient) -> None:
    one, other = DOCUMENTS["doc-20"], DOCUMENTS["doc-21"]
    client.chat(f"{one}\n\n{other}\n\nWho?")
    answer = client.chat(f"{one}\n\n{other}\n\nWhen?")
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
    assert not answer.get("kv_transfer_params"), "what a client does not know it does not get"
    found = {each["id"]: each for each in client.on_documents("show", ["doc-20", "doc-21"])["documents"]}
    assert found["doc-20"]["uses"] == found["doc-21"]["uses"] == 2
    assert found["doc-20"]["tokens"] >= 32
    assert client.on_documents("pin", ["doc-20"])["changed"] == ["doc-20"]
    assert client.on_documents("unpin", ["doc-20"])["changed"] == ["doc-20"]


def test_every_kind_of_response_has_its_statistics_where_they_are_requested(client: PlainClient) -> None:
    text = f"{DOCUMENTS['doc-20']}\n\nWhere?"
    chat = {"messages": [{"role": "user", "content": text}], "max_tokens": 2}
    kinds: dict[str, dict[str, Any]] = {
        "/chat/completions": chat,
        "/completions": {"prompt": text, "max_tokens": 2},
        "/responses": {"input": text, "max_output_tokens": 2},
    }
    for path, body in kinds.items():
        body = {"model": client.model, **body}
        told = client._http.post(path, json=body, headers={"x-ragcache-stats": "1"}).raise_for_status().json()
        assert told["ragcache"]["num_gpu_tokens"] >= 0, path
        assert "ragcache" not in client.post(path, **body)
    streamed = client._http.post(
        "/chat/completions",
        json={"model": client.model, **chat, "stream": True},
        headers={"x-ragcache-stats": "1"},
    )
    *_, last, end = [line for line in streamed.text.splitlines() if line]
    assert json.loads(last.removeprefix("data: "))["ragcache"]["num_gpu_tokens"] > 0
    assert end == "data: [DONE]"


def test_our_client_and_a_plain_one_share_the_kv_of_a_document(engine: Engine, client: PlainClient) -> None:
    layout = PromptLayout(document_format="{text}")
    document = Document("doc-22", DOCUMENTS["doc-22"])
    messages = layout.messages([document], "Who?")
    engine.generate(layout.render(engine.tokenizer, [document], "Who?"), max_tokens=2)
    plain = client.post("/chat/completions", model=client.model, messages=messages, max_tokens=2)
    assert plain["usage"]["prompt_tokens_details"]["cached_tokens"] > 60
    (found,) = client.on_documents("show", ["doc-22"])["documents"]
    assert found["uses"] == 2


def test_a_prompt_from_before_its_registration_is_named_by_the_next_one(client: PlainClient) -> None:
    text = text_of(100)
    client.chat(f"{text}\n\nWho?")
    register(client, {"late": text})
    assert client.on_documents("show", ["late"])["unknown"] == ["late"]
    assert client.chat(f"{text}\n\nWhen?")["usage"]["prompt_tokens_details"]["cached_tokens"] > 60
    assert client.on_documents("show", ["late"])["documents"][0]["bytes"]


def test_documents_in_a_request_are_registered_with_it_and_a_bad_one_rejects_it(client: PlainClient) -> None:
    text = text_of(300)
    inline = {"ragcache": {"register": [{"id": "inline", "text": text}]}}
    client.chat(f"{text}\n\nWho?", kv_transfer_params=inline)
    assert client.on_documents("show", ["inline"])["documents"][0]["uses"] == 1
    messages = [{"role": "user", "content": text}]
    for stream in (False, True):
        bad = {"kv_transfer_params": {"ragcache": {"register": [{"id": "", "text": text}]}}, "stream": stream}
        answer = client._http.post("/chat/completions", json={"model": client.model, "messages": messages, **bad})
        assert "register[0]: id is ''" in answer.text
        assert stream or answer.status_code == 400


def test_a_forgotten_document_is_neither_cached_nor_recognised(client: PlainClient) -> None:
    text = DOCUMENTS["doc-23"]
    for question in ("Who?", "When?"):
        client.chat(f"{text}\n\n{question}")
    receipt = client.on_documents("forget", ["doc-23"])
    assert receipt["is_complete"]
    assert receipt["forgotten"] == ["doc-23"]
    assert "purge" in receipt["unsearched"][0], "altered copies of it are not known by document"
    before = client.recognition()["num_recognised"]
    answer = client.chat(f"{text}\n\nWho?")
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] <= 32
    assert client.recognition()["num_recognised"] == before


@pytest.mark.slow
def test_restricted_texts_are_hit_by_their_groups_alone_after_a_restart_too(engine: Engine, folder: Path) -> None:
    client = PlainClient(engine, KEY)
    secret, public = text_of(200), text_of(201)
    register(client, {"secret": secret}, acl=["hr"])
    register(client, {"public": public})

    def cached(content: str, **body: Any) -> int:
        tokens: int = client.chat(content, **body)["usage"]["prompt_tokens_details"]["cached_tokens"]
        return tokens

    def check() -> None:
        for content in (secret, public):
            prompt = f"{content}\n\nWhen?"
            assert cached(prompt) == cached(prompt) == 0, "an unknown question follows: no two requests share KV"
        altered = f"{secret.replace('company', 'firm')}\n\nWho?"
        assert cached(altered) == cached(altered) == cached(f"{text_of(202)}\n\nWho?") == 0
        assert cached(f"{secret}\n\nWho?", cache_salt="hr-app") == 0
        assert cached(f"{secret}\n\nWhen?", cache_salt="hr-app") > 60, "they say themselves who shares it"
        assert cached(f"{secret}\n\nWho?", cache_salt="legal-app") == 0

    check()
    client.post("/ragcache/cache/purge")
    engine.close()
    with Engine.launch(str(DEMO_MODEL), **settings(folder)) as again:
        client = PlainClient(again, KEY)
        assert client.recognition()["num_documents"] > NUM_DOCUMENTS - 2
        check()


@pytest.mark.slow
def test_documents_of_a_plain_client_are_reused_in_another_order(tmp_path: Path) -> None:
    reuse = ChunkReuse(share=1.0, selection="cache_craft", alpha=1.0, max_recompute=0.3)
    cache = CacheConfig(kv_cache_bytes="24MiB", block_size=BLOCK, host_bytes="32MiB", chunk_reuse=reuse)
    launch = {**settings(tmp_path), "cache": cache}
    with Engine.launch(str(DEMO_MODEL), **launch) as running:
        client = PlainClient(running, KEY)
        register(client, DOCUMENTS)
        for order in ((0, 1, 2), (3, 2, 1, 0), (2, 0, 3)):
            client.chat("\n\n".join([*(DOCUMENTS[f"doc-{i}"] for i in order), "Who founded Zorval?"]))
        assert client.get("/ragcache/stats")["chunks"]["num_reused_chunks"] > 0
