"""Command lines that cannot work end with their status, before an engine is started or a file is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from ragcache_core.cli import cli
from ragcache_core.client import Engine
from ragcache_core.retrieval import DocumentStore
from ragcache_core.sim.traces.trace import Trace, TracedRequest, write_trace
from ragcache_core.types import Document

WRONG_USAGE = [
    "ask why --store {store}",
    "ask why --store {store} --model {model} --url http://127.0.0.1:1",
    "ask why --store {store} --url http://127.0.0.1:1 --json --stream",
    "ask why --store {store} --url http://127.0.0.1:1 --cache-config cache.toml",
    "ask why --store {store} --url http://127.0.0.1:1 -- --max-model-len 8",
    "ask why --store {store} --model {model} -- --api_key 8",
    "ask why --store {store} --model {model} --temperature nan",
    "bench --rates fast",
    "bench --engine http://127.0.0.1:1 --model {model}",
    "calibrate {model} --questions {questions} --quality 1.5",
    "compile {model} --store {store} --budget 1GiB",
    "compile {model} --store {store} --budget 1GiB --shared file:///kv --part 3/2",
    "compile {model} --store {store} --budget 1GiB --shared file:///kv --chunk-reuse",
    "compile {model} --store {store} --budget lots --shared file:///kv",
    "compile {model} --store {store} --budget 200 --shared file:///kv",
    "index {notes} --stroe {store}",
    "profile {model} --url http://127.0.0.1:1 --block-size 32",
    "profile {model} -- --port 8",
    "profile org/model --dry-run",
    "quality {model} --questions {questions} --alphas=-1",
    "quality {model} --questions {questions} --disk-bytes 1GiB",
    "quality {model} --questions {questions} --max-recompute nan",
    "serve {model} --chunk-reuse examples/demo",
    "serve {model} --connector NixlConnector",
    "serve {model} --data-parallel-size 2 --record-trace x",
    "serve {model} --startup-timeout inf",
    "serve {model} -- --host 0.0.0.0",
    "serve {model} -- --disable-log-stats",
    "simulate {trace} --per-request",
    "stats --url http://127.0.0.1:1 --every 3",
    "stats --url http://127.0.0.1:1 --watch --every 0",
    "trace make --workload mmlu --requests 9 --k 5 --documents 3 --output {new}",
    "warm --url http://127.0.0.1:1 --store {store} --trace {trace} --top 3",
]
IMPOSSIBLE = [
    ("bench --compare vllm,sglang --output {new}", "ConfigError"),
    ("bench --rates 2,1 --output {new}", "ConfigError"),
    ("compile {model} --store {store} --budget 1GiB --shared file:///kv --document-format x", "ConfigError"),
    ("compile {model} --store {store} --budget 1GiB --shared file:///kv --cost-model none", "ConfigError"),
    ("compile {model} --store {store} --budget 1GiB --shared redis://127.0.0.1:1/0", "ConfigError"),
    ("index {notes} --store {new} --chunk-tokens 100", "ConfigError"),
    ("index {notes} --store {new} --max-file-seconds nan", "ConfigError"),
    ("profile {model} --max-tokens 79", "ConfigError"),
    ("serve {model} --host-bytes -1", "ConfigError"),
    ("serve {model} --disk-bytes 1GiB --host-bytes 0", "ConfigError"),
    ("serve {model} --chunk-reuse quality=2", "ConfigError"),
    ("simulate {trace} --gpu-tokens 0", "ConfigError"),
    ("simulate {trace} --warm-up 200", "ConfigError"),
    ("simulate {notes}/none.jsonl", "TraceError"),
    ("store ls --store {new}", "StoreNotFoundError"),
    ("warm --url http://127.0.0.1:1 --store {store} --document-format x", "ConfigError"),
]


@pytest.fixture
def places(tmp_path: Path, demo_model: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Files that the command lines name; no engine may be started."""
    monkeypatch.setattr(Engine, "launch", lambda *_, **__: pytest.fail("an engine was started"))
    notes, store, trace, questions = (tmp_path / name for name in ("notes", "a.store", "a.jsonl", "questions.jsonl"))
    notes.mkdir()
    (notes / "mel.txt").write_text("Mel is a river.")
    with DocumentStore.create(store, index="flat") as made:
        made.add([Document("mel.txt", "Mel is a river.")])
    write_trace(Trace.from_requests(TracedRequest(float(i), ("a",), (9,), 3, 1) for i in range(9)), trace)
    questions.write_text('{"question": "Who?", "answer": "Mel", "documents": ["Mel is a river."]}\n')
    paths = {"notes": notes, "store": store, "trace": trace, "questions": questions, "new": tmp_path / "new"}
    return {"model": demo_model, **{name: str(path) for name, path in paths.items()}}


@pytest.mark.parametrize("line", WRONG_USAGE)
def test_wrong_usage_is_status_2(places: dict[str, str], line: str) -> None:
    result = CliRunner().invoke(cli, line.format(**places).split())
    assert result.exit_code == 2, result.output
    assert result.stderr.strip()
    assert not Path(places["new"]).exists()


@pytest.mark.parametrize(("line", "error"), IMPOSSIBLE)
def test_what_cannot_work_is_one_error_with_its_type(places: dict[str, str], line: str, error: str) -> None:
    result = CliRunner().invoke(cli, [*line.format(**places).split(), "--json"])
    assert result.exit_code == 1, result.output
    assert json.loads(result.stdout)["error"]["type"] == error
    assert not Path(places["new"]).exists()


@pytest.mark.parametrize("command", ["serve model", "profile model", "ask why"])
def test_option_of_vllm_is_answered_with_its_place(command: str) -> None:
    result = CliRunner().invoke(cli, [*command.split(), "--max-model-len", "8192"])
    assert result.exit_code == 2
    assert "vLLM" in result.output.splitlines()[-1]
    assert "'-- --max-model-len'" in result.output.splitlines()[-1]
    assert "mean" not in result.output
