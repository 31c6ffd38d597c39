"""Two tenants and an operator on one engine: none hits, times, sees or confirms what is another's.

One engine of this module's own. The last test kills it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from random import Random
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from ragcache_core import CacheConfig, Document, PromptLayout
from ragcache_core.client import Engine
from ragcache_core.errors import RequestRejectedError
from ragcache_core.stats import RequestStats
from ragcache_core.wire import KEY
from tests.conftest import DEMO_MODEL, ENGINE_ARGS
from tests.support.waiting import until

pytestmark = pytest.mark.slow

LAYOUT = PromptLayout()
BLOCK, BLOCK_BYTES = 32, 128 << 10
NUM_SAMPLES = 40
TIMEOUT_S = 60.0
KEYS = {"acme": "acme-" + "a" * 32, "other": "other-" + "b" * 32}
WORDS = ("Zorval", "Tenrik", "was", "a", "company", "founded", "by", "Anna", "Boris", "in", "1823", "makes", "clocks")


@pytest.fixture(scope="module")
def operator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine whose GPU holds 4 prompts, its host memory 2; ``acme`` may have 40 blocks of the disk."""
    folder = tmp_path_factory.mktemp("tenants")
    tenants = folder / "tenants.toml"
    tenants.write_text(
        f'[[tenants]]\nname = "acme"\nkeys = ["{KEYS["acme"]}"]\nquota = {{disk = {40 * BLOCK_BYTES}}}\n'
        f'[[tenants]]\nname = "other"\nkeys = ["{KEYS["other"]}"]\n'
    )
    cache = CacheConfig(
        kv_cache_bytes=96 * BLOCK_BYTES,
        block_size=BLOCK,
        host_bytes=48 * BLOCK_BYTES,
        disk_bytes="64MiB",
        directory=folder / "kv",
        tenants=tenants,
    )
    settings: dict[str, Any] = {**ENGINE_ARGS, "cache": cache, "env": {"VLLM_SERVER_DEV_MODE": "1"}}
    with Engine.launch(str(DEMO_MODEL), log_path=folder / "server.log", max_restarts=2, **settings) as running:
        yield running


@pytest.fixture(scope="module")
def engines(operator: Engine) -> Iterator[dict[str, Engine]]:
    """Each by its own key; ``operator`` has the server's."""
    with (
        Engine.connect(operator.base_url, api_key=KEYS["acme"], restart_timeout_s=300) as acme,
        Engine.connect(operator.base_url, api_key=KEYS["other"], restart_timeout_s=300) as other,
    ):
        yield {"acme": acme, "other": other, "operator": operator}


def documents(mark: str, num_words: int = 220) -> list[Document]:
    """Return two documents that no other test has in the cache, of the same words and so of as many tokens as any."""
    words = (WORDS * num_words)[:num_words]
    return [Document(f"{mark}-{i}", " ".join(Random(f"{mark} {i}").sample(words, num_words))) for i in range(2)]


def ask(engine: Engine, mark: str, **settings: Any) -> RequestStats:
    prompt = LAYOUT.render(engine.tokenizer, documents(mark), "Who founded Zorval?")
    return engine.generate(prompt, **{"max_tokens": 4, **settings}).stats


def get(engine: Engine, path: str, key: str) -> httpx.Response:
    return httpx.get(f"{engine.base_url}/ragcache/{path}", headers={"Authorization": f"Bearer {key}"}, timeout=30)


def test_no_tenant_hits_blocks_of_another_in_any_tier(engines: dict[str, Engine]) -> None:
    acme, other, operator = engines["acme"], engines["other"], engines["operator"]
    cold = ask(acme, "first")
    assert cold.num_cached_tokens == 0
    assert ask(acme, "first").num_gpu_tokens == cold.num_prompt_tokens // BLOCK * BLOCK
    for engine in (other, operator):
        assert ask(engine, "first").num_cached_tokens == 0, "not even the static prefix"
    assert ask(acme, "first", extra_body={"cache_salt": "of one user"}).num_cached_tokens == 0
    assert ask(acme, "first").num_cached_tokens > 0
    assert until(lambda: ask(acme, "first").num_stored_bytes == 0, TIMEOUT_S)
    for route in ("sleep?level=1", "wake_up"):  # what is on disk stays
        url = f"{operator.base_url.removesuffix('/v1')}/{route}"
        httpx.post(url, headers={"Authorization": f"Bearer {operator.api_key}"}, timeout=30).raise_for_status()
    for salt in ({"cache_salt": "of another user"}, {"cache_salt": "acme"}):
        assert ask(other, "first", extra_body=salt).num_cached_tokens == 0
    assert (ask(acme, "first").num_disk_tokens or 0) >= cold.num_prompt_tokens - 2 * BLOCK


def test_each_tenant_sees_its_own_metrics_documents_and_prefixes(engines: dict[str, Engine]) -> None:
    acme, other, operator = engines["acme"], engines["other"], engines["operator"]
    for _ in range(2):
        ask(acme, "contract")
    ask(other, "recipe")
    answered = httpx.post(
        f"{acme.base_url}/completions",
        headers={"Authorization": f"Bearer {acme.api_key}"},
        json={"model": acme.model, "prompt": "Who?", "max_tokens": 1},
        timeout=60,
    ).json()
    for engine, mine, his in ((acme, "contract", "recipe"), (other, "recipe", "contract")):
        assert until(lambda e=engine, m=mine: m in json.dumps(get(e, "stats", e.api_key).json()), TIMEOUT_S)
        shown = {path: get(engine, path, engine.api_key).text for path in ("stats", "cached_paths", "load", "costs")}
        assert f"{mine}-0" in shown["stats"]
        assert f"{mine}-1" in shown["cached_paths"]
        assert his not in json.dumps(shown)
        assert {"acme", "other"}.isdisjoint(json.loads(shown["stats"]))
        stats = engine.stats()
        assert [tier.name for tier in stats.tiers] == ["gpu", "host", "disk"]
        assert stats.tiers[0].used_bytes > 0
        assert stats.num_prompt_tokens == 0, "of /metrics, which is of all together, nothing"
    everything = operator.stats()
    assert everything.num_prompt_tokens > 0
    told = get(operator, "stats", operator.api_key).json()
    assert set(told["tenants"]) == {"acme", "other"}
    assert "contract" not in json.dumps(told["hottest_documents"])
    assert told["tenants"]["acme"]["tiers"][2]["capacity_bytes"] == 40 * BLOCK_BYTES
    assert get(operator, f"requests/{answered['id']}", acme.api_key).json()["num_gpu_tokens"] == 0
    assert get(operator, f"requests/{answered['id']}", other.api_key).status_code == 404
    assert httpx.get(f"{operator.base_url.removesuffix('/v1')}/metrics", timeout=30).status_code == 401


def test_what_is_not_for_tenants_is_refused_with_a_hint(engines: dict[str, Engine]) -> None:
    with pytest.raises(RequestRejectedError, match="the key is one of 'acme': ask with an operator's key"):
        engines["acme"].forget(["first-0"])
    receipt = engines["operator"].forget(["first-0"])
    assert receipt.forgotten == ("first-0",)
    assert ask(engines["acme"], "first").num_cached_tokens < 2 * BLOCK


def test_a_tenant_cannot_confirm_a_speculation_of_another(engines: dict[str, Engine]) -> None:
    def confirm(engine: Engine) -> None:
        url = f"{engine.base_url}/ragcache/speculations/guess/confirm"
        answer = httpx.post(url, headers={"Authorization": f"Bearer {engine.api_key}"}, timeout=30)
        assert answer.status_code == 204

    def num_confirmed() -> int:
        return int(get(engines["operator"], "stats", engines["operator"].api_key).json()["num_confirmed_speculations"])

    acme, before = engines["acme"], num_confirmed()
    metadata = {"version": 1, "speculation": "guess"}
    ask(acme, "guessed", extra_body={"kv_transfer_params": {KEY: metadata}})
    waited = get(acme, "speculations/guess", acme.api_key).json()
    assert waited["num_reports"] == 1
    for stranger in (engines["other"], engines["operator"]):
        confirm(stranger)
        assert num_confirmed() == before
        assert get(stranger, "speculations/guess", stranger.api_key).json()["num_reports"] == 0
    confirm(acme)
    assert until(lambda: num_confirmed() == before + 1, TIMEOUT_S)


def p_value(slow: list[float], fast: list[float], num_permutations: int = 20_000) -> float:
    """Return how likely a difference of means as large as this, of ``slow`` over ``fast``, is by chance alone."""
    values, rng = np.log([*slow, *fast]), np.random.default_rng(0)
    shuffled = rng.permuted(np.tile(values, (num_permutations, 1)), axis=1)
    differences = shuffled[:, : len(slow)].mean(axis=1) - shuffled[:, len(slow) :].mean(axis=1)
    seen = values[: len(slow)].mean() - values[len(slow) :].mean()
    return float((1 + (differences >= seen).sum()) / (1 + num_permutations))


@pytest.mark.alone
def test_a_strangers_prompt_is_no_faster_than_a_new_one(engines: dict[str, Engine]) -> None:
    """Samples are interleaved; that the test would see a hit is shown by who asked first asking again."""
    times: dict[str, list[float]] = {"new": [], "stranger's": [], "own": []}

    def timed(name: str, engine: Engine, mark: str) -> None:
        ttft_s = ask(engine, mark, max_tokens=1).ttft_s
        assert ttft_s is not None
        times[name].append(ttft_s)

    for i in range(NUM_SAMPLES):
        ask(engines["acme"], f"known {i}", max_tokens=1)
        asked = [("new", "other", f"new {i}"), ("stranger's", "other", f"known {i}"), ("own", "acme", f"known {i}")]
        Random(i).shuffle(asked)
        for name, who, mark in asked:
            timed(name, engines[who], mark)
    medians = {name: float(np.median(values)) for name, values in times.items()}
    by_chance = {name: p_value(times["new"], times[name]) for name in ("stranger's", "own")}
    print(f"TTFT medians {medians}, p {by_chance}")
    assert by_chance["own"] < 1e-3, "a hit is faster, and the test sees it"
    assert by_chance["stranger's"] > 1e-3
    resampled = np.random.default_rng(1).choice(np.log(times["new"]), (4000, NUM_SAMPLES)).mean(axis=1)
    resampled -= np.random.default_rng(2).choice(np.log(times["stranger's"]), (4000, NUM_SAMPLES)).mean(axis=1)
    saved = 1 - np.exp(-np.quantile(resampled, 0.999))
    whole = 1 - medians["own"] / medians["new"]
    print(f"a stranger saves less than {saved:.3f} (99.9 %), who has it cached {whole:.3f}")
    assert saved < whole, "whatever noise there is, it is not a hit"


def test_a_tenant_stays_within_quota_and_hits_its_own_blocks_after_a_crash(
    operator: Engine, engines: dict[str, Engine]
) -> None:
    def on_disk(name: str) -> int:
        return int(get(operator, "stats", operator.api_key).json()["tenants"][name]["tiers"][2]["num_blocks"])

    acme = engines["acme"]
    for i in range(4):
        assert until(lambda i=i: ask(acme, f"many {i}").num_stored_bytes == 0, TIMEOUT_S)
        assert on_disk("acme") <= 40
    assert until(lambda: on_disk("acme") > 20, TIMEOUT_S)
    for i in range(2):
        assert until(lambda i=i: ask(engines["other"], f"kept {i}").num_stored_bytes == 0, TIMEOUT_S)
    assert until(lambda: on_disk("other") > 40, TIMEOUT_S), "without a quota"
    assert operator.pid is not None
    core = (p for p in psutil.Process(operator.pid).children(recursive=True) if "EngineCore" in " ".join(p.cmdline()))
    next(core).kill()
    stats = ask(acme, "many 3")
    assert (stats.num_disk_tokens or 0) >= stats.num_prompt_tokens // 2
    assert ask(engines["other"], "many 3").num_cached_tokens == 0
    assert on_disk("acme") > 20, "what is found on disk is still whose it was"
