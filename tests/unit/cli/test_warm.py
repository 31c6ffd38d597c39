"""``ragcache warm``, and ``ragcache index --warm``, against a scripted server over real HTTP."""

from __future__ import annotations

import json
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ragcache_core.cli import cli
from ragcache_core.ordering import PathChange, static_prefix_digest
from ragcache_core.retrieval import DocumentStore
from ragcache_core.types import Document, PromptSegment, SegmentKind
from tests.support.cached_orders import all_cached
from tests.support.scripted_server import ENGINE_DEAD, IDLE, THREE_TIERS, Reply, ScriptedServer, Seen
from tests.support.waiting import until

RIVERS = ("mel", "tar", "zor", "aro")


@pytest.fixture
def server(demo_model: str) -> Iterator[ScriptedServer]:
    cache = {**THREE_TIERS, "num_requests": 0}
    with ScriptedServer(
        api_key="secret", root=demo_model, cache=cache, load=IDLE, cached_paths=all_cached([])
    ) as running:
        yield running


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("warm") / "rivers.store"
    with DocumentStore.create(path) as made:
        made.add(
            [Document(f"{name}.txt", f"The river {name} flows from {name}berg to the sea. " * 8) for name in RIVERS]
        )
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """mel, tar twice, mel, zor once; one request has a document that no store knows."""
    path = tmp_path / "trace.jsonl"
    wanted = [("mel", "tar"), ("mel", "tar"), ("mel", "zor"), ("zor", "other")]
    path.write_text(
        "".join(
            json.dumps({"t": i, "docs": [f"{n}.txt" for n in names], "doc_tokens": [9, 9], "question_tokens": 5,
                        "output_tokens": 1}) + "\n"
            for i, names in enumerate(wanted)
        )
    )  # fmt: skip
    return path


def warm(server: ScriptedServer, *arguments: object, key: str | None = "secret") -> Result:
    given = [] if key is None else ["--api-key", key]
    return CliRunner().invoke(cli, ["warm", "--url", server.url, *given, *map(str, arguments)], env={})


def sent(server: ScriptedServer) -> list[tuple[list[str], int]]:
    """Which documents were prefilled behind which, and how often they are expected."""
    metadata = [seen.kv_transfer_params["ragcache"] for seen in server.requests]
    assert all(each["prefill"] and each["speculation"] for each in metadata), "no client asks"
    return [([document["id"] for document in each["documents"]], each["expected_uses"]) for each in metadata]


def test_paths_of_a_trace_are_prefilled_in_order_with_the_uses_that_are_expected(
    server: ScriptedServer, store: Path, trace: Path
) -> None:
    result = warm(server, "--store", store, "--trace", trace)
    assert result.exit_code == 0, result.output
    assert sent(server) == [
        (["mel.txt"], 750),
        (["mel.txt", "tar.txt"], 500),
        (["zor.txt"], 250),
        (["mel.txt", "zor.txt"], 250),
    ] or sent(server)[2:] == [(["mel.txt", "zor.txt"], 250), (["zor.txt"], 250)]
    assert "picked 4 paths of 3 documents by 4 requests of trace.jsonl" in result.stdout
    assert "no forecast: 4 requests are too few" in result.stdout
    assert "1 documents are not in the store" in result.stdout
    assert "warmed 4 paths" in result.stdout


def test_questions_are_asked_of_the_stores_own_search(server: ScriptedServer, store: Path, tmp_path: Path) -> None:
    log = tmp_path / "asked.jsonl"
    log.write_text('{"question": "the river zor", "t": 3}\nthe river zor of zorberg\n{"about": "nothing"}\n\n')
    told = json.loads(warm(server, "--store", store, "--from-log", log, "-k", "1", "--json").stdout)
    assert sent(server) == [(["zor.txt"], 1000)]
    assert told["paths"][0]["doc_ids"] == ["zor.txt"]
    assert told["receipt"]["num_warmed"] == 1
    assert told["source"] == "2 questions of asked.jsonl"


def test_without_a_log_the_store_reports_what_is_near_to_what(server: ScriptedServer, store: Path) -> None:
    told = json.loads(warm(server, "--store", store, "--top", "2", "--dry-run", "--json").stdout)
    assert {i for path in told["paths"] for i in path["doc_ids"]} <= {f"{name}.txt" for name in RIVERS}
    assert len({i for path in told["paths"] for i in path["doc_ids"]}) == 2
    assert server.requests == []
    assert "receipt" not in told


def test_what_is_cached_already_is_passed_over(server: ScriptedServer, store: Path, trace: Path) -> None:
    warm(server, "--store", store, "--trace", trace)
    tar = next(seen for seen, (ids, _) in zip(server.requests, sent(server), strict=True) if ids[1:] == ["tar.txt"])
    ends = [document["end"] for document in tar.kv_transfer_params["ragcache"]["documents"]]
    changes = [PathChange(_prefix(tar), ("mel.txt", "tar.txt")[: n + 1], end) for n, end in enumerate(ends)]
    server.cached_paths = all_cached(changes)
    server.requests.clear()
    result = warm(server, "--store", store, "--trace", trace)
    assert "warmed 2 paths" in result.stdout
    assert "2 were cached already" in result.stdout
    assert sorted(sent(server)) == [(["mel.txt", "zor.txt"], 250), (["zor.txt"], 250)]
    assert server.prefetched == [], "it has no disk that works"
    assert server.cache is not None
    disk = {**server.cache["tiers"][2], "is_enabled": True}
    server.cache = {**server.cache, "tiers": [*server.cache["tiers"][:2], disk]}
    assert "2 were cached already" in warm(server, "--store", store, "--trace", trace).stdout
    assert len(server.prefetched) == 2, "what of it is on disk alone is read into host memory"


def _prefix(seen: Seen) -> bytes:
    documents = seen.kv_transfer_params["ragcache"]["documents"]
    segments = [PromptSegment(SegmentKind.DOCUMENT, d["start"], d["end"], d["id"]) for d in documents]
    prefix = static_prefix_digest(seen.body["prompt"], segments)
    assert prefix is not None
    return prefix


def test_an_engine_that_goes_away_in_the_middle_leaves_word_of_what_was_done(
    server: ScriptedServer, store: Path, trace: Path
) -> None:
    server.script(Reply("a"), ENGINE_DEAD)
    result = warm(server, "--store", store, "--trace", trace)
    assert result.exit_code == 1
    assert "1 of 4 paths are done, 1 of them prefilled now: run it again to go on" in result.stderr
    assert warm(server, "--store", store, "--trace", trace).exit_code == 0


def test_ctrl_c_ends_the_request_in_the_engine_and_reports_what_was_done(
    server: ScriptedServer, store: Path, trace: Path
) -> None:
    server.script(Reply("a"), Reply("b", wait_s=60.0))

    def interrupt() -> None:
        while len(server.requests) < 2:
            time.sleep(0.01)  # a poll: another thread makes it true
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)  # as a terminal does

    threading.Thread(target=interrupt, daemon=True).start()
    result = warm(server, "--store", store, "--trace", trace)
    assert result.exit_code == 130
    assert "1 of 4 paths are done" in result.stderr
    assert until(lambda: server.num_running == 0)


@pytest.mark.parametrize("num_repeats", [1, 8])
def test_what_was_found_since_is_set_beside_the_forecast_if_there_is_one(
    server: ScriptedServer, store: Path, trace: Path, tmp_path: Path, num_repeats: int
) -> None:
    report = tmp_path / "warmed.json"
    lines = trace.read_text().splitlines()
    requests = [{**json.loads(line), "t": i} for i, line in enumerate(lines * num_repeats)]
    trace.write_text("\n".join(map(json.dumps, requests)))
    assert warm(server, "--store", store, "--trace", trace, "--output", report).exit_code == 0
    assert server.cache is not None
    server.cache = {**server.cache, "num_requests": 200}
    server.cache["hottest_documents"] = [
        {"doc_id": "mel.txt", "frequency": 100 + 12.5, "num_tokens": 300, "tiers": ["gpu"]}
    ]
    told = json.loads(warm(server, "--report", report, "--json").stdout)
    assert told["achieved"]["num_requests"] == 200
    assert told["hottest_documents"] == [{"doc_id": "mel.txt", "expected_uses": 750, "uses": 500, "tiers": ["gpu"]}]
    lines = warm(server, "--report", report).stdout.splitlines()
    _heads, *forecasts, achieved = [line.split() for line in lines if "hottest" not in line and "mel.txt" not in line]
    assert achieved[:2] == ["achieved", "200"]
    assert lines[-1].split() == ["mel.txt", "750", "500", "gpu"]
    if num_repeats == 1:
        assert told["forecast"] is None
        assert not forecasts
        return
    assert told["forecast"]["num_requests"] == 16, "the second half of 32"
    assert told["forecast"]["warm"]["cached_share"] > told["forecast"]["cold"]["cached_share"]
    assert [row[:3] for row in forecasts] == [["forecast,", "warm", "16"], ["forecast,", "cold", "16"]]


def test_top_limits_what_is_picked_and_not_what_a_forecast_asks(server: ScriptedServer, tmp_path: Path) -> None:
    with DocumentStore.create(tmp_path / "many.store") as made:
        made.add(
            [Document(f"{i}.txt", f"{RIVERS[i % 4]} has bridge {i}, built by {RIVERS[i % 3]}. " * 8) for i in range(24)]
        )
    shares = {}
    for num in (2, 24):
        told = json.loads(warm(server, "--store", tmp_path / "many.store", "--top", num, "--dry-run", "--json").stdout)
        assert len({doc_id for path in told["paths"] for doc_id in path["doc_ids"]}) <= num
        assert told["forecast"]["num_requests"] == 12, "the second half of one for each document"
        shares[num] = told["forecast"]["warm"]["cached_share"]
    assert shares[2] < shares[24]


def test_an_engine_with_chunk_reuse_is_warmed_by_single_documents(
    server: ScriptedServer, store: Path, trace: Path
) -> None:
    counts = dict.fromkeys(
        ("num_chunks", "num_variants", "used_tokens", "disk_capacity_tokens", "used_disk_tokens", "num_requests",
         "num_refused_requests", "num_reused_chunks", "num_reused_tokens", "num_recomputed_tokens",
         "num_captured_chunks", "num_evicted_chunks", "num_mismatched_chunks", "num_too_long_chunks",
         "num_capacity_misses", "num_dropped_chunks", "num_corrupt_chunks", "num_lost_chunks"), 0
    )  # fmt: skip
    assert server.cache is not None
    server.cache = {**server.cache, "chunks": {**counts, "capacity_tokens": 5_000, "is_disk_enabled": False}}
    result = warm(server, "--store", store, "--trace", trace)
    assert result.exit_code == 0, result.output
    assert sent(server) == [(["mel.txt"], 750), (["tar.txt"], 500), (["zor.txt"], 500)]
    assert all(seen.kv_transfer_params["ragcache"]["chunk_reuse"] == "store" for seen in server.requests)


# What can be wrong


@pytest.mark.parametrize(
    ("option", "content", "said"),
    [
        ("--from-log", "", "it holds no question"),
        ("--from-log", '{"docs": ["a"]}\n', "it holds no question"),
        ("--from-log", '{"question": \n', "log:1: not JSON"),
        ("--from-log", "Where is Zor?\n\xff", "log:2: not UTF-8"),
        ("--trace", "", "no line of the log|the trace is empty|no request"),
        ("--trace", '{"t": 0, "docs": [], "doc_tokens": [], "question_tokens": 5, "output_tokens": 1}\n',
         "none of its requests retrieves a document"),
        ("--trace", '{"t": 0, "docs": ["strange"], "doc_tokens": [5], "question_tokens": 5, "output_tokens": 1}\n',
         "none of the 1 documents of .* is in .*rivers.store, 'strange' for one"),
    ],
)  # fmt: skip
def test_a_log_that_says_nothing_is_refused(
    server: ScriptedServer, store: Path, tmp_path: Path, option: str, content: str, said: str
) -> None:
    path = tmp_path / "log"
    path.write_bytes(content.encode("latin-1"))
    result = warm(server, "--store", store, option, path)
    assert result.exit_code == 1, result.output
    assert re.search(said, result.stderr), result.stderr
    assert server.requests == []
