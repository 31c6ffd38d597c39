"""What an engine has on disk is read before anybody asks, of prompts as the engine will see them."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from ragcache_core import Document, PromptLayout
from ragcache_core.client import Engine
from ragcache_core.client.cache import PrefetchRoute
from ragcache_core.client.server_api import ServerAPI
from ragcache_core.client.speculation.client import PreparedRequest
from ragcache_core.client.speculation.request_capture import CapturedRequest
from ragcache_core.errors import EngineError, PromptTooLongError
from tests.conftest import DEMO_MODEL
from tests.support.local_tokenizer import LocalTokenizer
from tests.support.scripted_server import THREE_TIERS, ScriptedServer

CHAT = [{"role": "user", "content": "Who founded Zorval?"}]


async def test_a_prompt_is_named_by_its_tokens_whatever_it_is_given_as() -> None:
    with ScriptedServer(cache=THREE_TIERS, api_key="secret", num_read_tokens=96, root=str(DEMO_MODEL)) as server:
        with Engine.connect(server.url, api_key="secret") as engine:
            rendered = PromptLayout().render(engine.tokenizer, [Document("a", "Zorval was founded.")], "When?")
            messages = [{"role": "user", "content": "When?"}]
            assert engine.prefetch(rendered) == engine.prefetch("When?") == 96
            assert await engine.aprefetch(messages, cache_salt="a tenant") == 96
            with pytest.raises(PromptTooLongError):
                engine.prefetch("word " * 5000)
            assert server.prefetched == [
                {"prompt_token_ids": list(rendered.token_ids)},
                {"prompt_token_ids": engine.tokenize("When?")},
                {"prompt_token_ids": engine.tokenize(messages), "cache_salt": "a tenant"},
            ]
            engine.prefetch("When?", model="an-adapter")
            assert server.prefetched[-1]["model"] == "an-adapter"


def test_a_server_that_is_gone_is_an_error() -> None:
    with httpx.Client() as http, pytest.raises(EngineError):
        PrefetchRoute(ServerAPI("http://127.0.0.1:9/v1", "key", http)).prefetch([1])


@pytest.mark.parametrize(
    ("body", "asked"),
    [
        ({"prompt": [1, 2]}, {"prompt_token_ids": [1, 2]}),
        (
            {"messages": [], "cache_salt": "s", "kv_transfer_params": {"prompt_token_ids": [3], "ragcache": {}}},
            {"prompt_token_ids": [3], "cache_salt": "s"},
        ),
        ({"model": "an-adapter", "prompt": [1]}, {"prompt_token_ids": [1], "model": "an-adapter"}),
        ({"prompt": "a text"}, None),
        ({"messages": []}, None),
        (
            {"messages": CHAT},
            {"prompt_token_ids": list(LocalTokenizer.of_model(str(DEMO_MODEL)).lay_out(CHAT, ()).token_ids)},
        ),
    ],
)
def test_the_tokens_of_a_speculative_request_are_read_if_present(
    body: dict[str, Any], asked: dict[str, Any] | None
) -> None:
    def start(captured: CapturedRequest) -> Any:
        raise AssertionError("it is sent")

    with (
        ScriptedServer(cache=THREE_TIERS, root=str(DEMO_MODEL)) as server,
        httpx.Client() as http,
        Engine.connect(server.url) as engine,
    ):
        request = httpx.Request("POST", f"{server.base_url}/completions", content=json.dumps(body))
        route = PrefetchRoute(ServerAPI(server.base_url, "key", http))
        PreparedRequest(start, route, CapturedRequest.of(request), engine.integration.prompts.tokens_of).prefetch()
        assert server.prefetched == ([] if asked is None else [asked])
