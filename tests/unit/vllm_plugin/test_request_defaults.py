"""What a server says that it adds to requests is what decides how its answers go on and end."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from ragcache_core.vllm_plugin.server.request_defaults import DefaultsHeader, request_defaults
from ragcache_core.wire import DEFAULTS_HEADER


def model(kind: str = "llama", source: str = "auto", override: dict[str, Any] | None = None, **defaults: Any) -> Any:
    """What is asked of vLLM's ``ModelConfig``."""
    return SimpleNamespace(
        get_diff_sampling_param=lambda: defaults,
        generation_config=source,
        override_generation_config=override or {},
        hf_config=SimpleNamespace(model_type=kind),
    )


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (model(temperature=0.6, top_p=0.9), {}),
        (model(max_tokens=512), {"max_tokens": 512}),
        (model(presence_penalty=1.5, frequency_penalty=0.1), {"presence_penalty": 1.5, "frequency_penalty": 0.1}),
        (model(max_tokens=99, override={"max_new_tokens": 99}), {"max_tokens": 99, "most_tokens": 99}),
        (model(source="/a/folder", max_tokens=99), {"max_tokens": 99, "most_tokens": 99}),
        (model("gpt_oss"), {"is_parsed": True}),
    ],
)
def test_it_says_what_depends_on_where_an_answer_is_cut(config: Any, said: dict[str, Any]) -> None:
    assert json.loads(request_defaults(config)) == said


def test_answers_to_completions_have_it_once_there_is_an_engine() -> None:
    async def fine(request: Any) -> PlainTextResponse:
        return PlainTextResponse("fine")

    app = Starlette(routes=[Route(path, fine) for path in ("/v1/completions", "/v1/chat/completions", "/health")])
    app.add_middleware(DefaultsHeader)
    with TestClient(app) as client:
        assert DEFAULTS_HEADER not in client.get("/v1/completions").headers
        app.state.ragcache_defaults = "{}"
        assert client.get("/v1/completions").headers[DEFAULTS_HEADER] == "{}"
        assert client.get("/v1/chat/completions").headers[DEFAULTS_HEADER] == "{}"
        assert DEFAULTS_HEADER not in client.get("/health").headers
