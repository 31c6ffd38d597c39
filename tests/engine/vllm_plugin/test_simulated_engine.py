"""The simulator with blocks serves the same requests from the same tiers as the engine, and as its scheduler alone."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ragcache_core import CacheConfig
from ragcache_core.client import Engine
from ragcache_core.client.launch import launch
from ragcache_core.profiles.prefill import find_profile
from ragcache_core.prompt import RenderedPrompt
from ragcache_core.sim.blocks import BlockCache
from ragcache_core.sim.options import SimulationOptions
from ragcache_core.sim.traces.trace import TracedRequest
from ragcache_core.tree import KnowledgeTree, check_invariants
from ragcache_core.types import PromptSegment, SegmentKind, Tier
from ragcache_core.vllm_plugin.settings import PluginSettings
from ragcache_core.wire import encode_kv_transfer_params, tile
from tests.conftest import DEMO_MODEL
from tests.engine.vllm_plugin import storing_scene
from tests.support.waiting import until

BLOCK = 32
BLOCK_BYTES = 128 << 10
NUM_GPU_BLOCKS, NUM_HOST_BLOCKS, NUM_DISK_BLOCKS = 30, 60, 100
SYSTEM_TOKENS = 40
MAX_MODEL_LEN = 800
GHOST_SIZE = 6
NUM_REQUESTS = 200
FIRST_TOKEN, LAST_TOKEN = 300, 1000
"""Ordinary words of the demo model; the answers are made of one more."""
PAGE_BYTES = 4096
"""Of host memory and disk, which small blocks fill whole."""
WRITING = "vllm:kv_offload_cpu_cache_write_usage_perc"


def requests() -> Iterator[TracedRequest]:
    """Yield requests for more documents than the tiers hold, popular ones and rare ones, of lengths across blocks."""
    rng = Random(20)
    lengths = [rng.choice((7, 31, 32, 33, 64, 90, 120, 150, 190, 230)) for _ in range(24)]
    weights = [1 / (rank + 1) for rank in range(len(lengths))]
    turns: dict[int, int] = {}
    for number in range(NUM_REQUESTS):
        talk = number // 4 if number % 40 < 20 else None  # of half of the requests four are turns of a conversation
        history = 0 if talk is None else turns.get(talk, 0)
        if history > MAX_MODEL_LEN // 3:
            talk, history = None, 0
        chosen = dict.fromkeys(rng.choices(range(len(lengths)), weights, k=rng.choice((0, 1, 1, 2, 2, 2, 3))))
        docs = tuple(chosen)
        has_question = not docs or rng.random() < 0.8  # without one, the same prompt comes again
        if talk is not None:
            docs = docs[:1]
        request = TracedRequest(
            arrival_s=float(number),
            doc_ids=tuple(f"d{doc}" for doc in docs),
            doc_tokens=tuple(lengths[doc] for doc in docs),
            question_tokens=rng.randint(3, 70) if has_question else 0,
            output_tokens=rng.choice((1, 1, 1, 2, 2, 3, 35) if talk is None else (35, 40, 70)),
            conversation=talk,
            history_tokens=history,
        )
        if talk is not None:
            turns[talk] = history + sum(request.doc_tokens) + request.question_tokens + request.output_tokens
        yield request


def words(name: str, num_tokens: int) -> list[int]:
    """Return tokens that no other name begins with."""
    return Random(name).choices(range(FIRST_TOKEN, LAST_TOKEN), k=num_tokens)


def rendered(request: TracedRequest, number: int, told: dict[int, RenderedPrompt]) -> RenderedPrompt:
    """Return the prompt of a request; ``told`` has each conversation's last one with its answer."""
    token_ids = words("system", SYSTEM_TOKENS)
    documents: list[PromptSegment] = []
    if request.conversation is not None and request.history_tokens:
        before = told[request.conversation]
        token_ids = list(before.token_ids)
        documents = [replace(s, end=s.text_end or s.end) for s in before.segments if s.kind is SegmentKind.DOCUMENT]
    for doc_id, num_tokens in zip(request.doc_ids, request.doc_tokens, strict=True):
        start = len(token_ids)
        token_ids += words(doc_id, num_tokens)
        documents.append(PromptSegment(SegmentKind.DOCUMENT, start, len(token_ids), doc_id))
    token_ids += words(f"question {number}", request.question_tokens)
    prompt = RenderedPrompt((), tuple(token_ids), tile(documents, len(token_ids)))
    if request.conversation is not None:
        answer = (LAST_TOKEN,) * request.output_tokens
        told[request.conversation] = replace(prompt, token_ids=prompt.token_ids + answer)
    return prompt


def wait_until_stored(engine: Engine) -> None:
    """Wait until the copies to the host that a request left behind it are done."""
    deadline = time.monotonic() + 30
    url = f"{engine.base_url.removesuffix('/v1')}/metrics"
    while True:
        text = httpx.get(url, headers={"Authorization": f"Bearer {engine.api_key}"}, timeout=30).text
        lines = "\n".join(line for line in text.splitlines() if WRITING in line)
        (gauge,) = text_string_to_metric_families(lines)
        if gauge.samples[0].value == 0:
            return
        assert time.monotonic() < deadline, "a copy to the host does not end"


def stamps(folder: Path) -> dict[Path, tuple[int, int]]:
    """Return when each file was written last, and its size."""
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*") if path.is_file()}


def wait_until_written(folder: Path, before: dict[Path, tuple[int, int]]) -> None:
    """Wait until what a request left for the disk is there: no event says so, but files change, and then rest."""
    assert until(lambda: stamps(folder) != before, 30)
    while (now := stamps(folder)) != before:
        before = now
        time.sleep(0.1)  # a poll: another process makes it true


def start_with(monkeypatch: pytest.MonkeyPatch, **settings: object) -> None:
    """Have the next engine start with settings that no user has."""
    cache_arguments = launch.cache_arguments

    def changed(*args: Any, **kwargs: Any) -> list[str]:
        arguments = cache_arguments(*args, **kwargs)
        at = arguments.index("--kv-transfer-config") + 1
        config = json.loads(arguments[at])
        config["kv_connector_extra_config"]["ragcache"] |= settings
        arguments[at] = json.dumps(config)
        return arguments

    monkeypatch.setattr(launch, "cache_arguments", changed)


@pytest.mark.slow
def test_the_simulator_and_the_engine_find_the_same_tokens_in_the_same_tiers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = tmp_path / "kv"
    config = CacheConfig(
        kv_cache_bytes=NUM_GPU_BLOCKS * BLOCK_BYTES,
        block_size=BLOCK,
        host_bytes=NUM_HOST_BLOCKS * BLOCK_BYTES,
        disk_bytes=NUM_DISK_BLOCKS * BLOCK_BYTES,
        compression="off",  # the simulator's blocks all have one size
        directory=kv,
    )
    options = SimulationOptions(
        gpu_tokens=NUM_GPU_BLOCKS * BLOCK,
        host_tokens=NUM_HOST_BLOCKS * BLOCK,
        disk_tokens=NUM_DISK_BLOCKS * BLOCK,
        system_tokens=SYSTEM_TOKENS,
        block_size=BLOCK,
    )
    start_with(monkeypatch, keeps_frequency=options.keeps_frequency, ghost_size=GHOST_SIZE)
    simulated = BlockCache(options, PluginSettings(profile=find_profile(str(DEMO_MODEL))).prefill_cost())
    monkeypatch.setattr(simulated.tree, "_ghost_size", GHOST_SIZE)  # no setting of a simulation
    found = dict.fromkeys(Tier, 0)
    with Engine.launch(
        str(DEMO_MODEL),
        cache=config,
        log_path=tmp_path / "server.log",
        dtype="float32",
        enforce_eager=True,
        max_model_len=MAX_MODEL_LEN,
    ) as engine:
        disk, told = simulated.tree.tiers[Tier.DISK], {}
        for number, request in enumerate(requests()):
            before, on_disk = stamps(kv), (disk.num_units, disk.num_evicted_units)
            stats = engine.generate(
                rendered(request, number, told),
                max_tokens=request.output_tokens,
                extra_body={"ignore_eos": True, "allowed_token_ids": [LAST_TOKEN]},
            ).stats
            # A block that the last step fills is stored when the request has ended, after its statistics.
            ends_with_block = (stats.num_prompt_tokens + request.output_tokens - 1) % BLOCK == 0
            if stats.num_stored_bytes or ends_with_block:
                wait_until_stored(engine)
            served = simulated.serve(request, number)
            if (disk.num_units, disk.num_evicted_units) != on_disk:
                wait_until_written(kv, before)
            real = (stats.num_gpu_tokens, stats.num_host_tokens, stats.num_disk_tokens)
            assert served.num_cached_tokens_by_tier == real, (number, request)
            assert stats.num_prompt_tokens == served.num_cached_tokens + served.num_new_tokens
            assert stats.num_loaded_bytes == served.num_loaded_tokens // BLOCK * BLOCK_BYTES
            num_late = served.num_swapped_out_tokens // BLOCK - stats.num_stored_bytes // BLOCK_BYTES
            assert num_late == 0 or (num_late == 1 and ends_with_block), (number, request)
            for tier in Tier:
                found[tier] += served.num_cached_tokens_by_tier[tier]
        report = engine.stats()
    assert report.num_requests == NUM_REQUESTS
    assert report.num_ignored_metadata == 0
    assert simulated.tree.returning.probability(1) > 0.2, "conversations go on"
    for said in report.tiers:
        state = simulated.tree.tiers[Tier[said.name.upper()]]
        expected = [(state.num_units, state.num_evicted_units)]
        if state is disk:
            expected.append(on_disk)  # the engine takes note of a write at its next step: not of the last request's
        assert (said.num_blocks, said.num_evicted_blocks) in expected
        assert state.num_evicted_units > 50, "the tiers are small enough"
    assert all(num_tokens > 0 for num_tokens in found.values())
    check_invariants(simulated.tree)


def rest(scheduler: Any, steps: storing_scene.Steps) -> None:
    """Step until all that the requests left for host and disk is there."""
    manager = storing_scene.ragcache_connector(scheduler.connector).tiers

    def rests() -> bool:
        while steps.step():
            pass
        return not manager.num_open_jobs

    assert until(rests, 30)
    assert manager.lower[0]._io.finish_writes(30)


def cached(tree: KnowledgeTree, names: dict[Any, tuple[int, int]]) -> dict[Tier, set[tuple[int, int]]]:
    """Return the blocks in each tier by their names: the first request that had one, and its place in the prompt."""
    return {
        tier: {
            names[key]
            for node in tree.nodes()
            for unit, key in enumerate(node.keys)
            if tree.resident_mask(node, tier) >> unit & 1
        }
        for tier in Tier
    }


@pytest.mark.usefixtures("identity")
@pytest.mark.parametrize("loads_by_layer", [False, True], ids=["loads_first", "loads_by_layer"])
def test_the_simulator_and_the_scheduler_keep_the_same_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, loads_by_layer: bool
) -> None:
    monkeypatch.setattr(storing_scene, "ANSWER", LAST_TOKEN)
    block = storing_scene.BLOCK
    num_gpu, num_host, num_disk = (num * BLOCK // block for num in (NUM_GPU_BLOCKS, NUM_HOST_BLOCKS, NUM_DISK_BLOCKS))
    with storing_scene.host_scheduler(
        num_gpu,
        str(num_host * PAGE_BYTES),
        is_async=True,
        max_num_batched_tokens=MAX_MODEL_LEN,
        layerwise_loads=loads_by_layer,
        disk_bytes=str(num_disk * PAGE_BYTES),
        directory=tmp_path,
    ) as scheduler:
        controller, steps = scheduler._controller, storing_scene.Steps(scheduler, is_async=True)
        options = SimulationOptions(
            gpu_tokens=num_gpu * block,
            host_tokens=controller.tiers[Tier.HOST].num_blocks * block,
            disk_tokens=controller.tiers[Tier.DISK].num_blocks * block,
            system_tokens=SYSTEM_TOKENS,
            block_size=block,
            overlaps_transfers=loads_by_layer,
        )
        simulated = BlockCache(options, PluginSettings().prefill_cost())
        told: dict[int, RenderedPrompt] = {}
        names: tuple[dict[Any, tuple[int, int]], dict[Any, tuple[int, int]]] = ({}, {})
        found = dict.fromkeys(Tier, 0)
        for number, request in enumerate(requests()):
            prompt = rendered(request, number, told)
            params = encode_kv_transfer_params(prompt.segments)
            asked = storing_scene.request(f"{number}", list(prompt.token_ids), request.output_tokens, params=params)
            before = [controller.counters.num_tokens_by_tier[tier] for tier in Tier]
            scheduler.add_request(asked)
            rest(scheduler, steps)
            run = simulated._cut(request, number)
            served = simulated.serve(request, number)
            after = [controller.counters.num_tokens_by_tier[tier] for tier in Tier]
            real = tuple(now - then for now, then in zip(after, before, strict=True))
            assert served.num_cached_tokens_by_tier == real, (number, request)
            for known, keys in zip(names, (run.keys, asked.block_hashes), strict=True):
                for place, key in enumerate(keys[: len(run.keys)]):
                    known.setdefault(key, (number, place))
            scheduler.on_forward_started()
            here, there = cached(simulated.tree, names[0]), cached(controller.tree, names[1])
            others = {tier: here[tier] ^ there[tier] for tier in Tier}
            assert not any(others.values()), (number, request, others)
            for tier in Tier:
                found[tier] += real[tier]
        assert all(num_tokens > 0 for num_tokens in found.values())
        assert all(state.num_evicted_units > 50 for state in simulated.tree.tiers)
        assert bool(steps.num_layer_loads) == loads_by_layer
