"""What a server says that it adds to requests is what decides how its answers go on and end."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from ragcache_core.vllm_plugin.server.request_defaults import request_defaults


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
def test_it_reports_what_depends_on_where_an_answer_is_cut(config: Any, said: dict[str, Any]) -> None:
    assert json.loads(request_defaults(config)) == said
