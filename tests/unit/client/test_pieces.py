"""The small rooms of the client: arguments, failures, metrics, plan, progress."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from types import SimpleNamespace

import httpx
import openai
import pytest

from ragcache_core.client import Engine
from ragcache_core.client.generation import AnswerReader
from ragcache_core.client.http.attempt import Health
from ragcache_core.client.http.errors import translate_errors, translated
from ragcache_core.client.launch.arguments import (
    cache_arguments,
    check_extra_args,
    check_model,
    new_log_path,
    server_environment,
    vllm_arguments,
)
from ragcache_core.client.launch.process import ServerProcess, check_port_free, claim_port, free_port
from ragcache_core.client.prompts.request_plan import (
    RememberedDocuments,
    RequestPlan,
)
from ragcache_core.client.server_api import ServerAPI
from ragcache_core.client.stats.cache_stats import parse_metrics
from ragcache_core.config import CacheConfig
from ragcache_core.errors import (
    ConfigError,
    EngineAuthError,
    EngineDiedError,
    EngineError,
    EngineStartError,
    EngineTimeoutError,
    EngineUnreachableError,
    PromptTooLongError,
    RAGCacheError,
    RequestRejectedError,
)
from ragcache_core.runtime.environment import CPU_KV_CACHE_BYTES_ENV
from ragcache_core.types import Document
from tests.support.scripted_server import ScriptedServer


def test_python_arguments_become_the_servers_flags() -> None:
    given = {"max_model_len": 2048, "enforce_eager": True, "enable_prefix_caching": False, "seed": None}
    given |= {"hf_overrides": {"a": 1}, "served_model_name": ("x", "y")}
    assert vllm_arguments(given) == [
        *("--max-model-len", "2048", "--enforce-eager", "--no-enable-prefix-caching"),
        *("--hf-overrides", '{"a": 1}', "--served-model-name", "x", "y"),
    ]


@pytest.mark.parametrize("name", ["model", "host", "port", "api_key", "kv_transfer_config"])
def test_an_argument_with_its_own_setting_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=.*use "):
        vllm_arguments({name: "x"})


@pytest.mark.parametrize("argument", ["--port", "--api-key=x", "--kv-transfer-config"])
def test_a_raw_argument_with_its_own_setting_is_refused(argument: str) -> None:
    check_extra_args(["--max-model-len", "2048", "--portal"])
    with pytest.raises(ConfigError, match=f"{argument} cannot be passed"):
        check_extra_args([argument])


@pytest.mark.parametrize("argument", ["--disable-log-stats", "--disable_log_stats"])
def test_what_takes_away_the_statistics_is_refused(argument: str) -> None:
    with pytest.raises(ConfigError, match=f"{argument} is refused: .* leave it out"):
        check_extra_args([argument])
    with pytest.raises(ConfigError, match="disable_log_stats=True is refused: .* leave it out"):
        vllm_arguments({"disable_log_stats": True})
    assert vllm_arguments({"disable_log_stats": False}) == ["--no-disable-log-stats"]
    check_extra_args(["--no-disable-log-stats"])


def test_no_cache_is_plain_vllm_and_a_cache_adds_the_connector() -> None:
    assert cache_arguments(None, engine_id="me") == []
    cache = CacheConfig(kv_cache_bytes="1GiB", block_size=16, host_bytes=0, policy="lru", queue_window=7)
    arguments = cache_arguments(cache, engine_id="me")
    connector = json.loads(arguments[arguments.index("--kv-transfer-config") + 1])
    assert connector["kv_connector_module_path"] == "ragcache_core.vllm_plugin.connector"
    assert connector["engine_id"] == "me"
    settings = connector["kv_connector_extra_config"]["ragcache"]
    assert (settings["policy"], settings["queue_window"]) == ("lru", 7)
    assert arguments[-4:] == ["--kv-cache-memory-bytes", str(1 << 30), "--block-size", "16"]


def test_the_tiers_below_the_gpu_have_the_sizes_that_were_chosen(tmp_path: Path) -> None:
    cache = CacheConfig(host_bytes="1GiB", disk_bytes="2GiB", directory=tmp_path)
    arguments = cache_arguments(cache, engine_id="me")
    extra = json.loads(arguments[arguments.index("--kv-transfer-config") + 1])["kv_connector_extra_config"]
    assert extra["cpu_bytes_to_use"] == 1 << 30
    (disk,) = extra["secondary_tiers"]
    assert (disk["directory"], disk["capacity_bytes"]) == (str(tmp_path), 2 << 30)
    without = json.loads(cache_arguments(CacheConfig(host_bytes=0), engine_id="me")[1])["kv_connector_extra_config"]
    assert {"cpu_bytes_to_use", "secondary_tiers"}.isdisjoint(without)


def test_a_shared_store_is_asked_after_the_engines_own_disk(tmp_path: Path) -> None:
    url = "redis://host:6379/0"
    store = {"shared": url, "shared_ttl": 60.0, "shared_bytes": "3GiB"}
    cache = CacheConfig(host_bytes="1GiB", disk_bytes="2GiB", directory=tmp_path, **store)
    arguments = cache_arguments(cache, engine_id="me")
    extra = json.loads(arguments[arguments.index("--kv-transfer-config") + 1])["kv_connector_extra_config"]
    assert [tier["type"] for tier in extra["secondary_tiers"]] == ["DiskTier", "SharedTier"]
    given = extra["secondary_tiers"][1]
    assert (given["url"], given["ttl_s"], given["max_bytes"]) == (url, 60.0, 3 << 30)
    only_read = json.loads(cache_arguments(CacheConfig(shared=url, shared_read_only=True), engine_id="me")[1])
    (given,) = only_read["kv_connector_extra_config"]["secondary_tiers"]
    assert given["is_read_only"]


def test_other_connectors_stand_before_ours_and_a_lost_block_is_a_miss_for_all() -> None:
    nixl = {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}
    cache = CacheConfig(host_bytes="1GiB", connectors=(nixl, {"kv_connector": "ExampleConnector"}))
    arguments = cache_arguments(cache, engine_id="me", most_host_bytes=1 << 40)
    transfer = json.loads(arguments[arguments.index("--kv-transfer-config") + 1])
    assert (transfer["kv_connector"], transfer["engine_id"]) == ("MultiConnector", "me")
    assert (transfer["kv_role"], transfer["kv_load_failure_policy"]) == ("kv_both", "recompute")
    *others, ours = transfer["kv_connector_extra_config"]["connectors"]
    assert others == [nixl, {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}]
    alone = cache_arguments(CacheConfig(host_bytes="1GiB"), engine_id="me", most_host_bytes=1 << 40)
    expected = json.loads(alone[alone.index("--kv-transfer-config") + 1])
    expected["kv_connector_extra_config"]["is_host_optional"] = False  # vLLM knows ours by its name
    assert ours == {name: expected[name] for name in ours}
    assert set(expected) - set(ours) == {"engine_id", "kv_load_failure_policy"}, "vLLM gives them the engine's"


@pytest.mark.parametrize(
    ("cache", "default"),
    [(CacheConfig(), str(1 << 30)), (CacheConfig(kv_cache_bytes="2GiB"), None), (None, str(1 << 30))],
)
def test_a_cpu_server_gets_a_kv_cache_size_unless_one_is_configured(
    cache: CacheConfig | None, default: str | None
) -> None:
    environment = server_environment("key", cache, {"MORE": "1"}, engine_id="me")
    assert environment.get(CPU_KV_CACHE_BYTES_ENV) == default
    assert (environment["VLLM_API_KEY"], environment["MORE"]) == ("key", "1")
    assert environment.get("VLLM_CPU_NUM_OF_RESERVED_CPU") == (None if cache is None else "1")
    asked = server_environment("key", cache, {"VLLM_CPU_NUM_OF_RESERVED_CPU": "3"}, engine_id="me")
    assert asked["VLLM_CPU_NUM_OF_RESERVED_CPU"] == "3"


def test_old_logs_make_room_for_new_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platformdirs.user_log_dir", lambda name: str(tmp_path / name))
    (tmp_path / "ragcache").mkdir()
    for i in range(60):
        (tmp_path / "ragcache" / f"engine-20250101-{i:06}-8000.log").touch()
    path = new_log_path(8000)
    path.touch()
    kept = sorted(p.name for p in path.parent.iterdir())
    assert len(kept) == 50
    assert kept[0] == "engine-20250101-000011-8000.log"
    assert kept[-1] == path.name


def test_where_no_log_can_be_kept_the_server_logs_to_standard_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr("platformdirs.user_log_dir", lambda name: str(tmp_path / "file" / name))
    assert new_log_path(8000) == Path("/dev/stderr")
    monkeypatch.setattr("platformdirs.user_log_dir", lambda name: f"/proc/{name}")
    assert new_log_path(8000) == Path("/dev/stderr")
    monkeypatch.setattr("platformdirs.user_log_dir", lambda name: str(tmp_path / "logs" / name))
    assert new_log_path(8000).parent == tmp_path / "logs" / "ragcache"
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write to a folder of any mode
    assert new_log_path(8000) == Path("/dev/stderr")


def test_a_path_without_a_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    for model, said in [
        (tmp_path / "none", "there is no model at"),
        (tmp_path / "file", "is a file"),
        (tmp_path / "folder", "no config.json"),
    ]:
        with pytest.raises(EngineStartError, match=said):
            check_model(str(model))
    check_model("organisation/name")


def test_a_taken_port_is_refused_with_a_hint(demo_model: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(EngineStartError, match=f"port {port} .*choose another port"):
            Engine.launch(demo_model, port=port)
    check_port_free("127.0.0.1", free_port("127.0.0.1"))


def test_the_port_of_a_server_that_loads_is_refused_to_a_second_one(demo_model: str) -> None:
    port = free_port("127.0.0.1")
    with claim_port("127.0.0.1", port), pytest.raises(EngineStartError, match="choose another port"):
        Engine.launch(demo_model, port=port)
    claim_port("127.0.0.1", port).close()


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://127.0.0.1:1/v1/", "http://[bad"])
def test_an_unreachable_server_is_reported_with_its_address(url: str) -> None:
    with pytest.raises(EngineUnreachableError, match="is the server running"):
        Engine.connect(url, timeout_s=2)


def test_an_address_without_a_scheme_is_rejected_with_a_hint() -> None:
    with pytest.raises(ConfigError, match="http://"):
        Engine.connect("localhost:8000", timeout_s=2)


@pytest.mark.parametrize(
    "page",
    [
        httpx.Response(200, html="<p>hello"),
        httpx.Response(200, json={"data": []}),
        httpx.Response(200, json=[]),
        httpx.Response(200, json={"data": [{"id": "m"}]}),
        httpx.Response(200, json={"data": [{"id": "m", "max_model_len": 0}]}),
        httpx.Response(404),
    ],
)
def test_what_is_not_a_vllm_server_is_refused(page: httpx.Response) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        page.request = request
        return page

    http = httpx.Client(transport=httpx.MockTransport(answer))
    with pytest.raises(EngineError, match="not a vLLM server"):
        ServerAPI("http://x/v1", "key", http).model_card()


def test_an_answer_that_stops_in_the_middle_is_not_taken_for_a_whole_one() -> None:
    reader = AnswerReader(RequestPlan())
    with pytest.raises(EngineDiedError, match="ended the answer early"):
        reader.stats()


def test_an_engine_reports_its_restarts_until_it_stays_dead(demo_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = SimpleNamespace(run=3, health=lambda: Health.READY, exit_reason=lambda: "it died three times")
    with ScriptedServer(root=demo_model) as server, Engine.connect(server.url) as engine:
        assert engine.num_restarts() == 0
        with monkeypatch.context() as patched:
            patched.setattr(engine, "_server", owner)
            assert engine.num_restarts() == 2
            owner.health = lambda: Health.GONE
            with pytest.raises(EngineDiedError, match="it died three times"):
                engine.num_restarts()


def test_a_server_whose_log_was_removed_has_no_last_words(tmp_path: Path) -> None:
    process = ServerProcess(["--help"], env={}, log_path=tmp_path / "log")
    try:
        process.log_path.unlink()
        assert process.log_text() == ""
        assert "logged nothing" in process.last_words()
    finally:
        process.kill()
    process.kill()
    assert process.returncode is not None


def test_a_new_log_is_private_and_an_existing_one_keeps_its_owner(tmp_path: Path) -> None:
    (tmp_path / "collected").touch()
    (tmp_path / "collected").chmod(0o640)
    before = os.umask(0)
    try:
        for log_path in (tmp_path / "logs" / "new", tmp_path / "collected"):
            ServerProcess(["--help"], env={}, log_path=log_path).kill()
    finally:
        os.umask(before)
    found = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    assert found == {"logs": 0o700, "new": 0o600, "collected": 0o640}


REQUEST = httpx.Request("POST", "http://host:1/v1/completions")


def _status(kind: type[openai.APIStatusError], status: int, message: str) -> openai.APIStatusError:
    return kind(message, response=httpx.Response(status, request=REQUEST), body=None)


@pytest.mark.parametrize(
    ("error", "ours"),
    [
        (openai.APITimeoutError(REQUEST), EngineTimeoutError),
        (openai.APIConnectionError(request=REQUEST), EngineUnreachableError),
        (httpx.ConnectError("refused", request=REQUEST), EngineUnreachableError),
        (httpx.ReadTimeout("slow", request=REQUEST), EngineTimeoutError),
        (httpx.RemoteProtocolError("cut"), EngineDiedError),
        (_status(openai.AuthenticationError, 401, "Unauthorized"), EngineAuthError),
        (_status(openai.BadRequestError, 400, "maximum context length is 2048 tokens"), PromptTooLongError),
        (_status(openai.BadRequestError, 400, "temperature must be positive"), RequestRejectedError),
        (_status(openai.NotFoundError, 404, "The model `x` does not exist."), RequestRejectedError),
        (_status(openai.InternalServerError, 500, "EngineCore encountered an issue."), EngineDiedError),
        (
            _status(openai.InternalServerError, 500, "The server had an error while processing your request."),
            EngineDiedError,
        ),
        (_status(openai.InternalServerError, 500, "a bug"), EngineError),
        (openai.APIError("EngineDeadError", REQUEST, body=None), EngineDiedError),
    ],
)
def test_errors_of_the_connection_become_ours(error: Exception, ours: type[RAGCacheError]) -> None:
    with pytest.raises(ours) as raised, translate_errors():
        raise error
    assert type(raised.value) is ours


def _gave_up(body: dict[str, object]) -> openai.InternalServerError:
    request = httpx.Request("POST", "http://host:1/v1/chat/completions", json=body)
    message = "Error code: 500 - {'error': {'message': 'Internal server error'}}"
    return openai.InternalServerError(message, response=httpx.Response(500, request=request), body=None)


@pytest.mark.parametrize(
    "constraint",
    [
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "a+"}},
    ],
)
def test_an_answer_without_a_next_token_is_distinguished_from_other_failures(constraint: dict[str, object]) -> None:
    error = translated(_gave_up({"messages": [], **constraint}))
    assert type(error) is EngineError
    assert "follow a grammar" in str(error)
    assert "LLMSingleSelector" in str(error)


def test_our_own_error_below_the_sdk_comes_out_again() -> None:
    def fail() -> None:
        try:
            raise EngineDiedError("gave up")
        except EngineDiedError as cause:
            raise openai.APIConnectionError(request=REQUEST) from cause

    with pytest.raises(EngineDiedError, match="gave up"), translate_errors():
        fail()


def test_metrics_are_summed_over_engines() -> None:
    page = "\n".join(
        [
            "# TYPE vllm:num_requests_running gauge",
            'vllm:num_requests_running{engine="0"} 2.0',
            'vllm:num_requests_running{engine="1"} 3.0',
            "# TYPE vllm:prefix_cache_hits_total counter",
            'vllm:prefix_cache_hits_total{engine="0"} 64.0',
            "# TYPE vllm:time_to_first_token_seconds histogram",
            'vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf"} 4.0',
            'vllm:time_to_first_token_seconds_count{engine="0"} 4.0',
            'vllm:time_to_first_token_seconds_sum{engine="0"} 0.5',
            'vllm:time_to_first_token_seconds_bucket{engine="1",le="+Inf"} 1.0',
            'vllm:time_to_first_token_seconds_count{engine="1"} 1.0',
            'vllm:time_to_first_token_seconds_sum{engine="1"} 0.25',
            "# TYPE vllm:kv_cache_usage_perc gauge",
            'vllm:kv_cache_usage_perc{engine="0"} 0.25',
            'vllm:kv_cache_usage_perc{engine="1"} 0.75',
        ]
    )
    stats = parse_metrics(page + "\n", num_restarts=1)
    assert (stats.num_running, stats.num_prefix_hit_tokens, stats.kv_cache_usage) == (5, 64, 0.5)
    assert stats.num_restarts == 1
    assert (stats.num_first_tokens, stats.mean_ttft_s) == (5, 0.15)


def test_remembered_documents_are_bounded_and_the_latest_come_first() -> None:
    remembered = RememberedDocuments(capacity=2)
    remembered.add([Document("a", "A"), Document("b", "B")])
    remembered.add([Document("a", "A")])
    remembered.add([Document("c", "C")], shown=lambda d: f"<{d.text}>")
    assert remembered.shown() == [("c", "<C>"), ("a", "A")]
