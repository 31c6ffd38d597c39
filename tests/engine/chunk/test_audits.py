"""An engine that bounds the errors of its chunk reuse: it audits its own answers, and nothing else notices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import httpx
import pytest

from ragcache_core import CacheConfig, Document, PromptLayout, RequestStats
from ragcache_core.client import Engine
from ragcache_core.config import ChunkReuse
from ragcache_core.stats import ChunkKindStats, ChunkStats
from tests.conftest import DEMO_MODEL, ENGINE_ARGS
from tests.support.waiting import until

_LAYOUT = PromptLayout()
_WORDS = ("Zorval", "Tenrik", "was", "a", "company", "founded", "by", "Anna", "Boris", "in", "1823", "makes", "clocks")
_DOCUMENTS = {name: Document(name, " ".join(Random(name).choices(_WORDS, k=60))) for name in "abcdefgh"}
_QUESTION = "Who founded Zorval?"
_FEW = 4
"""Exact answers before the first approximate one."""


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    cache = CacheConfig(
        kv_cache_bytes="24MiB", block_size=32, host_bytes="32MiB", chunk_reuse=ChunkReuse(max_error=1 / _FEW)
    )
    log = tmp_path_factory.mktemp("audited") / "log"
    with Engine.launch(str(DEMO_MODEL), log_path=log, **{**ENGINE_ARGS, "cache": cache}) as running:
        yield running


def _ask(engine: Engine, names: Sequence[str], chunk_reuse: object = None, **how: object) -> tuple[str, RequestStats]:
    prompt = _LAYOUT.render(engine.tokenizer, [_DOCUMENTS[name] for name in names], _QUESTION)
    generation = engine.generate(prompt, max_tokens=8, chunk_reuse=chunk_reuse, **how)  # type: ignore[arg-type]
    return generation.text, generation.stats


def _chunks(engine: Engine) -> ChunkStats:
    chunks = engine.stats().chunks
    assert chunks is not None
    return chunks


def _kind(engine: Engine, name: str) -> ChunkKindStats:
    return next((each for each in _chunks(engine).kinds if each.kind == name), ChunkKindStats(name))


def test_the_engine_finds_out_which_of_its_answers_are_wrong_and_holds_the_bound(
    audited: Engine, engine: Engine
) -> None:
    rng, num_wrong, num_approximate, prompts = Random(1), 0, 0, []
    for number in range(32):
        prompts.append("".join(rng.sample("abcdefgh", 4)))
        text, stats = _ask(audited, prompts[-1], {"kind": "shuffled"})
        if stats.chunk_reuse is None:
            assert text == _ask(engine, prompts[-1])[0], "exact"
            continue
        assert number >= _FEW
        num_approximate += 1
        num_wrong += text != _ask(engine, prompts[-1])[0]
        assert until(lambda: _kind(audited, "shuffled").num_audits == num_approximate, timeout_s=20)  # noqa: B023
    found = _kind(audited, "shuffled")
    assert (found.num_answers, found.num_approximate) == (32, num_approximate)
    assert num_approximate > 4
    assert 0 < num_wrong == found.num_errors <= 32 / _FEW, "documents of random words depend on each other"
    for prompt in prompts[:5]:
        assert _ask(audited, prompt, False)[0] == _ask(engine, prompt)[0]


def test_audits_are_in_no_other_statistics_and_the_bound_is_a_metric(audited: Engine) -> None:
    before, audits = audited.stats(), sum(kind.num_audits for kind in _chunks(audited).kinds)
    rng, num_tokens = Random(2), 0
    for _ in range(12):
        _, stats = _ask(audited, "".join(rng.sample("abcdefgh", 4)), {"kind": "other orders"})
        num_tokens += stats.num_prompt_tokens
        assert until(lambda: audited.stats().num_running == 0, timeout_s=20)
    assert until(lambda: sum(kind.num_audits for kind in _chunks(audited).kinds) > audits, timeout_s=20)
    names = ("num_requests", "num_first_tokens", "num_prompt_tokens", "num_prefix_query_tokens")

    def growth() -> list[int]:
        after = audited.stats()
        return [getattr(after, name) - getattr(before, name) for name in names]

    assert until(lambda: growth() == [12, 12, num_tokens, num_tokens], timeout_s=20), growth()
    _ask(audited, "ab")  # with its step come the figures
    page = httpx.get(f"{audited.base_url.removesuffix('/v1')}/metrics").text
    assert 'kind="other orders"' in page
    assert "ragcache_chunk_error_bound{" in page


def test_a_request_with_settings_of_its_own_and_one_of_another_tenant_are_exact(audited: Engine) -> None:
    refused = _chunks(audited).num_refused_requests
    for _ in range(2 * _FEW):
        assert _ask(audited, "dcba", {"alpha": 0.0})[1].chunk_reuse is None
        assert _ask(audited, "dcba", extra_body={"cache_salt": "theirs"})[1].chunk_reuse is None
    assert _chunks(audited).num_refused_requests == refused + 4 * _FEW


def test_deleted_documents_are_audited_no_more_and_pending_audits_do_not_keep_the_engine_alive(
    audited: Engine, engine: Engine
) -> None:
    for names in ("abcd", "dcba", "badc", "cdab"):
        _ask(audited, names, {"kind": "shuffled"})
    assert audited.forget(list("abcdefgh")).is_complete
    assert _ask(audited, "abcd", False)[0] == _ask(engine, "abcd")[0]
    for names in ("abcd", "dcba", "badc", "cdab"):
        _ask(audited, names, {"kind": "shuffled"})
    pid = audited.pid
    audited.close()
    assert pid is not None
    assert until(lambda: not Path(f"/proc/{pid}").exists(), timeout_s=20)
