"""``ragcache profile``: what it launches, measures, keeps and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ragcache_core.cli import cli
from ragcache_core.client import Engine
from ragcache_core.profiles.prefill import find_profile, load_profile
from ragcache_core.runtime.environment import CPU_KV_CACHE_BYTES_ENV
from tests.support.clocked_engine import ClockedEngine, linear_s

URL = "http://127.0.0.1:8000"


@pytest.fixture(autouse=True)
def user_data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("platformdirs.user_data_dir", lambda name: str(tmp_path / "data" / name))
    return tmp_path / "data"


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, demo_model: str) -> ClockedEngine:
    """The engine that is launched, or joined."""
    clocked = ClockedEngine(root=demo_model)

    def join(where: str, **settings: Any) -> ClockedEngine:
        clocked.settings.update(settings, where=where)
        return clocked

    monkeypatch.setattr(Engine, "launch", join)
    monkeypatch.setattr(Engine, "connect", join)
    return clocked


def run(model: str, *arguments: str) -> Result:
    return CliRunner().invoke(cli, ["profile", model, *arguments])


def test_the_profile_is_kept_for_the_model_and_shown_as_a_table(engine: ClockedEngine, demo_model: str) -> None:
    result = run(demo_model, "--max-tokens", "300")
    assert result.exit_code == 0, result.output
    head, columns, *rows = result.stdout.splitlines()
    assert head.startswith("demo_model-")
    assert head.endswith(", unknown, vLLM 0.32.0")
    assert columns.split() == ["cached,", "new:", "ms", "32", "64", "128", "300"]
    assert [row.split() for row in rows] == [
        ["0", "10.3", "10.6", "11.3", "13.0"],
        ["128", "10.4", "10.8", "11.4", "-"],
        ["256", "10.6", "-", "-", "-"],
    ]
    path = find_profile(demo_model)
    assert path is not None
    assert result.stderr == f"ragcache: kept in {path}\n"
    assert load_profile(path).estimate_s(128, 64) == linear_s(128, 64)
    assert engine.num_closed == 1


def test_a_launch_is_of_plain_vllm_with_the_sizes_given(engine: ClockedEngine, demo_model: str, tmp_path: Path) -> None:
    options = ["--kv-cache-bytes", "1GiB", "--block-size", "32", "--startup-timeout", "9", "--api-key", "k"]
    log = str(tmp_path / "server.log")
    Path(log).write_text("Initializing a V1 LLM engine with config: dtype=torch.float32,")
    engine.log_path = Path(log)
    result = run(demo_model, *options, "--log", log, "--max-tokens", "120", "--", "--dtype", "float32")
    assert result.exit_code == 0, result.output
    assert ", float32, " in result.stdout
    assert engine.settings == {
        "where": demo_model,
        "cache": None,
        "api_key": "k",
        "tokenizer": None,
        "startup_timeout_s": 9.0,
        "max_restarts": 0,
        "log_path": Path(log),
        "env": {CPU_KV_CACHE_BYTES_ENV: str(1 << 30)},
        "extra_args": ("--dtype", "float32"),
        "kv_cache_memory_bytes": 1 << 30,
        "block_size": 32,
    }


def test_a_server_that_runs_is_joined(engine: ClockedEngine, demo_model: str) -> None:
    result = run(demo_model, "--url", URL, "--api-key", "k", "--max-tokens", "120")
    assert result.exit_code == 0, result.output
    assert engine.settings == {"where": URL, "api_key": "k"}
    assert find_profile(demo_model) is not None


def test_a_server_of_another_model_is_refused(engine: ClockedEngine, demo_model: str) -> None:
    engine.root = "org/other"
    result = run(demo_model, "--url", URL)
    assert result.exit_code == 1
    assert f"serves 'org/other', not '{demo_model}': give that as MODEL" in result.stderr
    engine.root = "/there/demo_model"  # the same name on a machine whose files are not here
    assert run(demo_model, "--url", URL, "--max-tokens", "120").exit_code == 0


def test_ctrl_c_closes_the_engine_and_leaves_the_old_profile(engine: ClockedEngine, demo_model: str) -> None:
    run(demo_model, "--max-tokens", "120")
    path = find_profile(demo_model)
    assert path is not None
    before = path.read_bytes()

    def interrupt(number: int) -> None:
        if number == 20:
            raise KeyboardInterrupt

    engine.on_request = interrupt
    result = run(demo_model, "--max-tokens", "120")
    assert (result.exit_code, result.stderr) == (130, "ragcache: interrupted\n")
    assert engine.num_closed == 2
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_a_dry_run_shows_the_plan_and_launches_nothing(
    demo_model: str, user_data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "launch", lambda *_, **__: pytest.fail("a model was loaded"))
    result = run(demo_model, "--dry-run", "--max-tokens", "300")
    assert result.exit_code == 0
    assert "cached tokens  0 128 256\nnew tokens     32 64 128 300\n" in result.stdout
    assert "8 prompts of at most 300 tokens, 3 times each" in result.stdout
    plan = json.loads(run(demo_model, "--dry-run", "--json").stdout)
    assert plan["max_tokens"] == 4095  # what the model's configuration says, and one token is generated
    assert [0, 4095] in plan["points"]
    assert not user_data_dir.exists()
