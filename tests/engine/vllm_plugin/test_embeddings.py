"""Embeddings that are left out of a message end an engine that computes its prompt: refused at the server's door."""

from __future__ import annotations

import base64
import io
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from fastapi import FastAPI
from vllm.config import DeviceConfig, KVTransferConfig, ModelConfig, VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.renderers import ChatParams, renderer_from_config

from ragcache_core import CacheConfig
from ragcache_core.client import Engine
from ragcache_core.recognition import PromptTexts
from ragcache_core.vllm_plugin.server.recognition.tokenizing import DocumentTokenizer
from ragcache_core.vllm_plugin.server.routes import RAGCacheEndpoint
from tests.conftest import ENGINE_ARGS
from tests.engine.vllm_plugin.listening_model import write_listening_model

pytestmark = pytest.mark.slow

NUM_TOKENS, HIDDEN_SIZE = 5, 64
_OURS = "ragcache_core.vllm_plugin.connector"
LEFT_OUT = {"audio_num_tokens": [NUM_TOKENS]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_listening_model(tmp_path_factory.mktemp("listening"))


def engine_client(model: Path, connector: str = "RAGCacheConnector", module: str | None = _OURS) -> Any:
    """Return what a server has of its engine, but for the engine."""
    transfer = KVTransferConfig(
        kv_connector=connector, kv_connector_module_path=module, kv_role="kv_both", engine_id="embeddings"
    )
    model_config = ModelConfig(model=str(model), dtype="float32")
    config = VllmConfig(model_config=model_config, device_config=DeviceConfig("cpu"), kv_transfer_config=transfer)

    async def is_sleeping() -> bool:
        return False

    return SimpleNamespace(
        vllm_config=config,
        model_config=config.model_config,
        renderer=renderer_from_config(config),
        engine_core=None,
        is_sleeping=is_sleeping,
    )


def embeddings() -> str:
    """Return as many embeddings as :data:`LEFT_OUT` says, as a message holds them."""
    file = io.BytesIO()
    torch.save(torch.zeros(NUM_TOKENS, HIDDEN_SIZE), file)
    return base64.b64encode(file.getvalue()).decode()


async def render(client: Any, content: object) -> list[int]:
    message: Any = {"role": "user", "content": [{"type": "audio_embeds", "audio_embeds": content}]}
    _, (prompt,) = await client.renderer.render_chat_async([[message]], ChatParams())
    ids: list[int] = prompt["prompt_token_ids"]
    return ids


async def enter(client: Any, *, is_enabled: bool) -> None:
    state: Any = FastAPI().state
    state.ragcache_has_peers = False
    await RAGCacheEndpoint().init_state(client, state, Namespace(enable_mm_embeds=is_enabled))


async def test_vllm_lets_embeddings_be_left_out_where_a_connector_loads_kv(model: Path) -> None:
    assert len(await render(engine_client(model), LEFT_OUT)) >= NUM_TOKENS


@pytest.mark.parametrize(("is_enabled", "said"), [(False, "--enable-mm-embeds"), (True, "audio_embeds")])
async def test_embeddings_that_are_left_out_are_refused(model: Path, is_enabled: bool, said: str) -> None:
    client = engine_client(model)
    await enter(client, is_enabled=is_enabled)
    with pytest.raises((ValueError, VLLMValidationError), match=said):
        await render(client, LEFT_OUT)


async def test_a_document_beside_a_sound_is_found_in_the_tokens_that_vllm_makes(model: Path) -> None:
    client = engine_client(model)
    tokenizer = DocumentTokenizer(client.renderer.get_tokenizer())
    await enter(client, is_enabled=True)
    document = "Nalna is a city on the coast. Nalna was founded by Anna Zor."
    sound = {"type": "audio_embeds", "audio_embeds": {"audio_embeds": embeddings()}}
    message: Any = {"role": "user", "content": [sound, {"type": "text", "text": f"{document} Is it what you hear?"}]}
    _, (prompt,) = await client.renderer.render_chat_async([[message]], ChatParams())
    ids: list[int] = prompt["prompt_token_ids"]
    ((start, end),) = filter(None, PromptTexts(tokenizer.token_bytes, tokenizer.encode).find(ids, [(document, 0)]))
    assert start > NUM_TOKENS
    assert ids[start:end] == tokenizer.encode(document)


def test_an_engine_that_listens_survives_embeddings_that_are_left_out(model: Path, tmp_path: Path) -> None:
    cache = CacheConfig(kv_cache_bytes="64MiB", block_size=32, host_bytes="64MiB")
    settings: dict[str, Any] = {**ENGINE_ARGS, "cache": cache, "load_format": "dummy", "max_restarts": 0}
    with Engine.launch(str(model), log_path=tmp_path / "log", **settings) as engine:

        def ask(*parts: object) -> httpx.Response:
            message = {"role": "user", "content": [{"type": "text", "text": "What is it? " * 20}, *parts]}
            body = {"model": engine.model, "messages": [message], "max_tokens": 4, "temperature": 0}
            headers = {"Authorization": f"Bearer {engine.api_key}"}
            return httpx.post(f"{engine.base_url}/chat/completions", headers=headers, json=body, timeout=60)

        first, again = ask().json(), ask().json()
        refused = ask({"type": "audio_embeds", "audio_embeds": LEFT_OUT})
        last = ask().json()
        assert first["choices"][0]["message"] == again["choices"][0]["message"] == last["choices"][0]["message"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert (refused.status_code, "--enable-mm-embeds" in refused.text) == (400, True)
        assert engine.stats().num_restarts == 0
