"""``ragcache profile``: what it launches, measures, keeps and refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import ragcache_core
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


def test_json_is_one_object_with_every_time(engine: ClockedEngine, demo_model: str, tmp_path: Path) -> None:
    result = run(demo_model, "--json", "--max-tokens", "120", "--repeats", "2", "--output", str(tmp_path / "p.json"))
    told = json.loads(result.stdout)
    assert result.stderr == ""
    assert (told["num_repeats"], told["spread"], told["path"]) == (2, 0.0, str(tmp_path / "p.json"))
    assert told["points"][0] == {"cached_tokens": 0, "new_tokens": 32, "times_s": [linear_s(0, 32)] * 2}
    assert {**json.loads((tmp_path / "p.json").read_text()), "points": told["points"], "path": told["path"]} == told
    assert find_profile(demo_model) is None


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
    result = run(demo_model, "--url", URL, "--api-key", "k", "--tokenizer", "t", "--max-tokens", "120")
    assert result.exit_code == 0, result.output
    assert engine.settings == {"where": URL, "api_key": "k", "tokenizer": "t"}
    assert find_profile(demo_model) is not None


def test_a_server_elsewhere_says_so_in_its_profile(engine: ClockedEngine, demo_model: str, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    arguments = ["--url", "http://gpu-7:8000", "--max-tokens", "120"]
    refused = run(demo_model, *arguments)
    assert refused.exit_code == 2
    assert "has hardware of its own: give --output FILE" in refused.stderr
    assert run(demo_model, *arguments, "--output", str(path)).exit_code == 0
    assert json.loads(path.read_text())["hardware"] == "the machine of http://gpu-7:8000"


def test_a_server_of_another_model_is_refused(engine: ClockedEngine, demo_model: str) -> None:
    engine.root = "org/other"
    result = run(demo_model, "--url", URL)
    assert result.exit_code == 1
    assert f"serves 'org/other', not '{demo_model}': give that as MODEL" in result.stderr
    engine.root = "/there/demo_model"  # the same name on a machine whose files are not here
    assert run(demo_model, "--url", URL, "--max-tokens", "120").exit_code == 0


def test_an_address_that_cannot_be_read_is_refused_where_it_is_joined(demo_model: str) -> None:
    for url in ("127.0.0.1:1", "http://[", "http://127.0.0.1:1"):
        result = run(demo_model, "--url", url)
        assert result.exit_code == 1
        assert f"no engine answers at {url}" in result.stderr


def test_times_that_cannot_be_saved_are_shown_all_the_same(
    engine: ClockedEngine, demo_model: str, user_data_dir: Path
) -> None:
    engine.on_request = lambda _: user_data_dir.touch()  # a file where a folder is to be made
    result = run(demo_model, "--max-tokens", "120")
    assert result.exit_code == 1
    assert "cached, new: ms" in result.stdout
    assert str(user_data_dir) in result.stderr


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


def test_noise_is_told_but_not_for_a_single_slow_request(engine: ClockedEngine, demo_model: str) -> None:
    engine.time_s = lambda _cached, _new: 3.0 if len(engine.prompts) == 2 else 1.0
    assert "differ" not in run(demo_model, "--max-tokens", "120").stderr
    engine.prompts.clear()
    engine.time_s = lambda _cached, _new: 1.0 + len(engine.prompts) / 100
    result = run(demo_model, "--max-tokens", "120", "--repeats", "9")
    assert re.search(r"repeated times differ by \d\d%: measure on an idle machine, or raise --repeats", result.stderr)


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


def test_a_dry_run_over_a_server_shows_what_it_takes(engine: ClockedEngine, demo_model: str) -> None:
    engine.max_model_len = 512
    plan = json.loads(run(demo_model, "--dry-run", "--json", "--url", URL).stdout)
    assert (plan["max_tokens"], engine.prompts, engine.num_closed) == (511, [], 1)
    assert find_profile(demo_model) is None


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (["--url", URL, "--block-size", "32"], 2, "leave out --block-size"),
        (["--url", URL, "--startup-timeout", "9"], 2, "leave out --startup-timeout"),
        (["--url", URL, "--", "--dtype", "float32"], 2, "leave out what follows '--'"),
        (["--", "--port", "8"], 2, "--port after '--'"),
        (["--repeats", "0"], 2, "0 is not in the range"),
        (["--max-tokens", "0"], 2, "0 is not in the range"),
        (["--max-tokens", "79"], 1, "at most 79 tokens leave nothing to measure, 80 are needed"),
        (["--max-tokens", "90", "--block-size", "32"], 1, "96 are needed with blocks of 32"),
        (["--block-size", "0"], 1, "CacheConfig.block_size is 0"),
        (["--kv-cache-bytes", "lots"], 1, "CacheConfig.kv_cache_bytes is 'lots'"),
        (["--output", "/"], 1, "/ is a folder: name a file"),
        (["--output", "/dev/null/x.json"], 1, "/dev/null is no writable folder"),
    ],
)
def test_options_that_cannot_work_are_refused_before_a_model_is_loaded(
    engine: ClockedEngine, demo_model: str, options: list[str], status: int, message: str
) -> None:
    result = run(demo_model, *options)
    assert result.exit_code == status
    assert message in result.stderr
    assert engine.settings == {}


@pytest.mark.parametrize(
    ("model", "options", "status", "message"),
    [
        ("no such folder", [], 1, "there is no model at 'no such folder'"),
        ("org/model", ["--dry-run"], 2, "the context window of 'org/model' is unknown: give --max-tokens"),
    ],
)
def test_models_that_cannot_be_profiled_are_refused(
    engine: ClockedEngine, model: str, options: list[str], status: int, message: str
) -> None:
    result = run(model, *options)
    assert result.exit_code == status
    assert message in result.stderr
    assert engine.settings == {}


def test_its_help_ends_with_examples_that_name_real_options() -> None:
    text = CliRunner().invoke(cli, ["profile", "--help"], terminal_width=100).stdout
    described, _, examples = text.partition("\nExamples:\n")
    lines = examples.strip().splitlines()
    assert all(line.strip().startswith("ragcache profile ") for line in lines)
    used = {flag for line in lines for flag in re.findall(r"(?<= )--[a-z-]+", line.split(" -- ")[0])}
    assert used >= {"--url", "--repeats", "--dry-run"}
    assert all(re.search(rf"{flag}\b", described) for flag in used), used


def test_its_help_imports_nothing_heavy() -> None:
    code = """
import sys
from click.testing import CliRunner
from ragcache_core.cli import cli
assert CliRunner().invoke(cli, ["profile", "--help"]).exit_code == 0
heavy = {"torch", "vllm", "transformers", "openai", "numpy", "httpx", "rich"} & set(sys.modules)
assert not heavy, heavy
"""
    root = Path(ragcache_core.__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=False)
    assert done.returncode == 0, done.stderr
