"""What we rely on inside vLLM 0.32. If one of these fails after an upgrade, it says what the name is for.

The names live in ``ragcache_core/vllm_plugin/compat.py``; they are read in a child process, because importing vLLM
takes seconds and sets process-wide state.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

_READ = """
import inspect, json
from ragcache_core.vllm_plugin import compat
from vllm.entrypoints.launchers.api_server import entry
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from ragcache_core.vllm_plugin.connector import DocumentConnector
import vllm
base = compat.KVConnectorBase_V1
print(json.dumps({
    "version": vllm.__version__,
    "abstract": sorted(base.__abstractmethods__),
    "still_abstract": sorted(DocumentConnector.__abstractmethods__),
    "signatures": {name: list(inspect.signature(getattr(base, name)).parameters) for name in (
        "on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta",
        "request_finished", "start_load_kv", "save_kv_layer", "wait_for_layer_load", "wait_for_save")},
    "requires_kv_delivery": isinstance(inspect.getattr_static(base, "requires_kv_delivery"), property),
    "hma": list(inspect.signature(compat.SupportsHMA.request_finished_all_groups).parameters),
    "main": list(inspect.signature(entry.main).parameters),
    "chat_takes_metadata": "kv_transfer_params" in ChatCompletionRequest.model_fields,
    "completion_takes_metadata": "kv_transfer_params" in CompletionRequest.model_fields,
    "chat_takes_token_ids": "prompt_token_ids" in inspect.getsource(ChatCompletionRequest),
}))
"""


@pytest.fixture(scope="module")
def vllm_facts() -> dict[str, object]:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", _READ], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    facts: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return facts


def test_this_is_the_supported_vllm(vllm_facts: dict[str, object]) -> None:
    assert str(vllm_facts["version"]).startswith("0.32"), "support a new vLLM in compat.py, then change SUPPORTED_VLLM"


def test_the_connector_has_every_method_that_vllm_asks_for(vllm_facts: dict[str, object]) -> None:
    assert vllm_facts["still_abstract"] == [], "implement the new abstract methods in vllm_plugin/connector.py"


def test_the_connectors_methods_have_the_arguments_we_implement(vllm_facts: dict[str, object]) -> None:
    assert vllm_facts["signatures"] == {
        "on_new_request": ["self", "request"],
        "get_num_new_matched_tokens": ["self", "request", "num_computed_tokens"],
        "update_state_after_alloc": ["self", "request", "blocks", "num_external_tokens"],
        "build_connector_meta": ["self", "scheduler_output"],
        "request_finished": ["self", "request", "block_ids"],
        "start_load_kv": ["self", "forward_context", "kwargs"],
        "save_kv_layer": ["self", "layer_name", "kv_layer", "attn_metadata", "kwargs"],
        "wait_for_layer_load": ["self", "layer_name"],
        "wait_for_save": ["self"],
    }, "follow the change in vllm_plugin/connector.py"
    assert vllm_facts["hma"] == ["self", "request", "block_ids"], "follow it in DocumentConnector"
    assert vllm_facts["requires_kv_delivery"], "DocumentConnector overrides it: a lost transfer is no failure"


def test_the_server_program_is_where_we_start_it(vllm_facts: dict[str, object]) -> None:
    assert vllm_facts["main"] == [], "compat.run_api_server() calls it without arguments"


def test_requests_carry_our_metadata_and_token_ids(vllm_facts: dict[str, object]) -> None:
    assert vllm_facts["chat_takes_metadata"], "wire.py needs another channel"
    assert vllm_facts["completion_takes_metadata"], "wire.py needs another channel"
    assert vllm_facts["chat_takes_token_ids"], "plan_chat sends the prompt's ids in kv_transfer_params"
