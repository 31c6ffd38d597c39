"""``ragcache serve`` without a server: what it starts, says, watches and refuses."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from click.testing import CliRunner, Result

from ragcache_core.cli import cli
from ragcache_core.client import Engine
from ragcache_core.client.http.attempt import Health
from ragcache_core.client.launch import process
from ragcache_core.config import CacheConfig, ChunkReuse
from ragcache_core.errors import EngineStartError


@dataclass
class FakeEngine:
    """An engine that gives the readings it was told to, then what ends it."""

    readings: list[int]
    end: BaseException
    base_url: str = "http://127.0.0.1:8000/v1"
    api_key: str = "key"
    model: str = "demo"
    max_model_len: int = 2048
    log_path: Path = Path("server.log")
    settings: dict[str, Any] = field(default_factory=dict)
    num_closed: int = 0
    drained_s: list[float] = field(default_factory=list)
    end_of_drain: BaseException | None = None
    ends_in_time: bool = True

    def drain(self, timeout_s: float) -> bool:
        assert not self.num_closed
        self.drained_s.append(timeout_s)
        if self.end_of_drain is not None:
            raise self.end_of_drain
        return self.ends_in_time

    def num_restarts(self) -> int:
        if not self.readings:
            raise self.end
        return self.readings.pop(0)

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.num_closed += 1


def run(monkeypatch: pytest.MonkeyPatch, engine: FakeEngine, *arguments: str) -> Result:
    monkeypatch.setattr("ragcache_core.cli.commands.serve._POLL_S", 0.0)
    monkeypatch.setattr(Engine, "launch", lambda model, **given: engine.settings.update(given, model=model) or engine)
    return CliRunner().invoke(cli, ["serve", "demo", *arguments])


def test_it_announces_itself_and_ends_cleanly_on_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine([0, 0], KeyboardInterrupt())
    result = run(monkeypatch, engine)
    assert (result.exit_code, engine.num_closed) == (0, 1)
    assert result.stdout.splitlines()[:3] == [
        "url            http://127.0.0.1:8000/v1",
        "api key        key",
        "page           http://127.0.0.1:8000/ragcache",
    ]
    assert "ready" in result.stderr


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_key_is_printed_only_if_it_was_generated_and_never_beside_a_log(
    monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    def said(log: str, *more: str) -> str:
        engine = FakeEngine([], KeyboardInterrupt(), api_key="s3cret", log_path=Path(log))
        result = run(monkeypatch, engine, *options, *more)
        assert result.exit_code == 0
        return result.output

    assert "s3cret" in said("server.log")
    assert "s3cret" not in said("server.log", "--api-key", "s3cret")
    assert "s3cret" not in said("/dev/stdout", "--log", "-", "--api-key", "s3cret")
    for log in ("/dev/stdout", "/dev/stderr"):  # standard error is the default where no file can be written
        printed = said(log)
        assert "s3cret" not in printed
        assert "set --api-key or RAGCACHE_API_KEY" in printed
    monkeypatch.setenv("RAGCACHE_API_KEY", "s3cret")
    assert "s3cret" not in said("server.log")


def test_sigterm_lets_running_requests_end_and_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for options, seconds in ([], 20.0), (["--drain", "3"], 3.0):
        engine = FakeEngine([0], SystemExit(143))
        result = run(monkeypatch, engine, *options)
        assert (result.exit_code, engine.drained_s, engine.num_closed) == (0, [seconds], 1)
        assert result.stderr.endswith(f"ragcache: stopping: running requests have {seconds:g} s\n")


def test_requests_that_do_not_end_in_time_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine([0], SystemExit(143), ends_in_time=False)
    result = run(monkeypatch, engine)
    assert (result.exit_code, engine.num_closed) == (0, 1)
    assert result.stderr.endswith("ragcache: warning: requests that still run are cut\n")


@pytest.mark.parametrize("end", [SystemExit(143), KeyboardInterrupt()], ids=["SIGTERM", "Ctrl-C"])
def test_a_second_signal_does_not_wait_for_running_requests(
    monkeypatch: pytest.MonkeyPatch, end: BaseException
) -> None:
    engine = FakeEngine([0], SystemExit(143), end_of_drain=end)
    run(monkeypatch, engine)
    assert (engine.drained_s, engine.num_closed) == ([20.0], 1)


def test_json_announces_one_object(monkeypatch: pytest.MonkeyPatch) -> None:
    announced = json.loads(run(monkeypatch, FakeEngine([], KeyboardInterrupt()), "--json").stdout)
    assert set(announced) == {"url", "api_key", "page", "model", "max_model_len", "log", "pid"}
    announced = json.loads(run(monkeypatch, FakeEngine([], KeyboardInterrupt()), "--json", "--no-cache").stdout)
    assert "page" not in announced, "plain vLLM has none"


def test_going_back_to_plain_vllm_takes_one_option(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: dict[str, Any] = {}
    engine = FakeEngine([], KeyboardInterrupt())
    monkeypatch.setattr(Engine, "launch", lambda model, **given: launched.update(given) or engine)
    result = CliRunner().invoke(cli, ["serve", "org/model", "--host-bytes", "1GiB", "--policy", "lru", "--no-cache"])
    assert launched["cache"] is None
    assert "--host-bytes" in result.stderr
    assert "no effect" in result.stderr


def test_with_json_logs_everything_that_is_printed_is_json(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine([0], SystemExit(143), log_path=Path("/dev/stdout"))
    launched: dict[str, Any] = {}

    def launch(model: str, **given: Any) -> FakeEngine:
        launched.update(given)
        given["progress"]("loading weights")  # as there is no terminal
        logging.getLogger("ragcache.core.client").warning("RC-ENGINE-RESTARTS: the engine died, restarting")
        return engine

    monkeypatch.setattr(Engine, "launch", launch)
    monkeypatch.setattr("ragcache_core.cli.commands.serve._POLL_S", 0.0)
    result = CliRunner().invoke(cli, ["serve", "demo", "--log-format", "json"])
    assert launched["log_format"] == "json"
    said = [json.loads(line) for line in result.stderr.splitlines()]
    assert said[1]["event"] == "RC-ENGINE-RESTARTS"
    assert [(line["level"], line["message"]) for line in said[:1]] == [("INFO", "engine: loading weights")]
    assert [(line["level"], line["message"].split(":")[0]) for line in said[1:]] == [
        ("WARNING", "the engine died, restarting"),
        ("WARNING", "the random API key is not printed into a log"),
        ("INFO", "stopping"),
    ]
    assert json.loads(result.stdout)["url"] == engine.base_url
    monkeypatch.setattr(Engine, "launch", lambda *_, **__: (_ for _ in ()).throw(EngineStartError("no model\nlog")))
    (line,) = CliRunner().invoke(cli, ["serve", "demo", "--log-format", "json"]).stderr.splitlines()
    assert json.loads(line)["message"] == "no model\nlog"
    logging.getLogger("ragcache.core.client").warning("as text again")


def test_a_liveness_probe_is_answered_while_the_engine_loads_and_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    port, said = process.free_port("127.0.0.1"), []
    engine = FakeEngine([0, 0, 0], SystemExit(143))
    watch = SimpleNamespace(health=lambda: Health.READY)
    monkeypatch.setattr(engine, "integration", SimpleNamespace(watch=watch), raising=False)

    def probe() -> None:
        said.append(httpx.get(f"http://127.0.0.1:{port}/live").json()["state"])

    def launch(*_: object, **__: object) -> FakeEngine:
        probe()
        return engine

    def num_restarts() -> int:
        probe()
        if len(said) == 4:
            raise SystemExit(143)
        watch.health = lambda: Health.RESTARTING if len(said) == 2 else Health.READY
        return 0

    def drain(_: float) -> bool:
        probe()
        return True

    monkeypatch.setattr(engine, "num_restarts", num_restarts)
    monkeypatch.setattr(engine, "drain", drain)
    monkeypatch.setattr(Engine, "launch", launch)
    monkeypatch.setattr("ragcache_core.cli.commands.serve._POLL_S", 0.0)
    result = CliRunner().invoke(cli, ["serve", "demo", "--probe-port", str(port)])
    assert result.exit_code == 0, result.output
    assert said == ["loading", "ready", "restarting", "ready", "stopping"]


@dataclass
class FakeFleet(FakeEngine):
    """Several engines of one launch."""

    engines: tuple[FakeEngine, ...] = ()


def two_ranks(end: BaseException) -> FakeFleet:
    ranks = tuple(
        FakeEngine([0, 1, 1], end, base_url=f"http://127.0.0.1:{port}/v1", log_path=Path(f"{port}.log"))
        for port in (8000, 8001)
    )
    return FakeFleet([], end, engines=ranks)


def test_several_ranks_announce_each_address_and_are_watched_and_ended_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = two_ranks(KeyboardInterrupt())
    result = run(monkeypatch, fleet, "--data-parallel-size", "2")
    assert (result.exit_code, fleet.num_closed) == (0, 1)
    assert fleet.settings["data_parallel_size"] == 2
    assert [line.split()[1] for line in result.stdout.splitlines() if line.startswith("url")] == [
        "http://127.0.0.1:8000/v1",
        "http://127.0.0.1:8001/v1",
    ]
    assert 'Fleet.connect(["http://127.0.0.1:8000", "http://127.0.0.1:8001"], api_key=...)' in result.stderr
    announced = json.loads(run(monkeypatch, two_ranks(KeyboardInterrupt()), "--json").stdout)
    assert [rank["log"] for rank in announced["ranks"]] == ["8000.log", "8001.log"]


def test_options_reach_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine([], KeyboardInterrupt())
    options = ["--port", "0", "--api-key", "k", "--kv-cache-bytes", "1GiB", "--block-size", "32", "--max-restarts", "2"]
    options += ["--restart-window", "60", "--hang-timeout", "0"]
    run(monkeypatch, engine, *options, "--", "--max-model-len", "2048", "--dtype=float32")
    assert engine.settings["cache"] == CacheConfig(kv_cache_bytes="1GiB", block_size=32)
    assert (engine.settings["port"], engine.settings["api_key"], engine.settings["max_restarts"]) == (None, "k", 2)
    assert (engine.settings["restart_window_s"], engine.settings["hang_timeout_s"]) == (60.0, None)
    assert engine.settings["extra_args"] == ("--max-model-len", "2048", "--dtype=float32")


def test_every_setting_of_the_cache_is_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine([], KeyboardInterrupt())
    options = ["--host-bytes", "2GiB", "--disk-bytes", "3GiB", "--cache-dir", "/kv", "--policy", "pgdsf"]
    options += ["--disk-key-file", "/key", "--tenants", "/tenants.toml", "--max-cached-documents", "5"]
    options += ["--shared", "redis://host:6379/0", "--shared-ttl", "60", "--compression", "lz4"]
    options += ["--shared-bytes", "200GiB", "--no-shared-read-only"]
    options += ["--replicated-share", "0.25", "--max-age", "3600", "--pinned-share", "0.5"]
    options += ["--max-retain-s", "60", "--retained-share", "0.1"]
    options += ["--queue", "fifo", "--queue-window", "7", "--max-prefill-bs", "2", "--max-documents", "500"]
    options += ["--no-layerwise-loads"]
    options += ["--chunk-reuse", "selection=cache_craft, max-recompute=0.3,is_default=false"]
    run(monkeypatch, engine, *options, "--kv-cache-bytes", "1GiB", "--block-size", "32")
    given = engine.settings["cache"]
    assert given == CacheConfig(
        kv_cache_bytes="1GiB",
        block_size=32,
        host_bytes="2GiB",
        disk_bytes="3GiB",
        directory="/kv",
        disk_key_file="/key",
        shared="redis://host:6379/0",
        shared_bytes="200GiB",
        shared_ttl=60.0,
        shared_read_only=False,
        compression="lz4",
        tenants="/tenants.toml",
        policy="pgdsf",
        max_cached_documents=5,
        layerwise_loads=False,
        replicated_share=0.25,
        max_age=3600.0,
        pinned_share=0.5,
        max_retain_s=60.0,
        retained_share=0.1,
        queue="fifo",
        queue_window=7,
        max_prefill_bs=2,
        max_documents=500,
        chunk_reuse=ChunkReuse(selection="cache_craft", max_recompute=0.3, is_default=False),
    )
    assert given.model_fields_set == set(CacheConfig.model_fields) - {"connectors"}, "which excludes chunk_reuse"


def test_a_shared_store_is_only_read_if_an_option_or_the_file_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "cache.toml"
    file.write_text('[cache]\nshared = "file:///kv"\nshared_read_only = true\n', encoding="utf-8")
    of_file = ["--cache-config", str(file)]
    for options, is_read_only in (
        (["--shared", "file:///kv", "--shared-read-only"], True),
        (of_file, True),
        ([*of_file, "--no-shared-read-only"], False),
    ):
        engine = FakeEngine([], KeyboardInterrupt())
        run(monkeypatch, engine, *options)
        assert engine.settings["cache"].shared_read_only is is_read_only


def test_other_connectors_are_options_as_vllm_describes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine([], KeyboardInterrupt())
    nixl, example = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}, {"kv_connector": "ExampleConnector"}
    run(monkeypatch, engine, "--connector", json.dumps(nixl), "--connector", json.dumps(example))
    assert engine.settings["cache"] == CacheConfig(connectors=(nixl, example))
