"""``ragcache batch`` and ``engine.batch`` on a real engine whose cache holds few of the documents."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.engines import block_bytes
from ragcache_core.cli import cli
from ragcache_core.client import Engine, Generation
from ragcache_core.client.generation import Prompt
from ragcache_core.config import CacheConfig
from ragcache_core.prompt import PromptLayout
from ragcache_core.retrieval import DocumentStore
from ragcache_core.types import Document

pytestmark = pytest.mark.slow  # an engine of its own

TOPICS = ("zor", "mel", "tar", "oru", "vel", "kin", "pav", "sul")
NUM_QUESTIONS = 4  # about each topic
CACHED_BLOCKS = 36  # of 32 tokens: about two of the documents beside the requests that run


@pytest.fixture(scope="module")
def small(demo_model: str) -> Iterator[Engine]:
    """An engine whose GPU memory holds the KV of two documents, and which has no other tier."""
    cache = CacheConfig(kv_cache_bytes=CACHED_BLOCKS * block_bytes(demo_model), block_size=32, host_bytes=0)
    with Engine.launch(
        demo_model,
        cache=cache,
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=1,  # otherwise a batch's rounding differs by what runs beside a request
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def questions() -> list[str]:
    made = [f"where is house {i} of {topic}" for topic in TOPICS for i in range(NUM_QUESTIONS)]
    random.Random(3).shuffle(made)
    return made


def documents() -> dict[str, Document]:
    return {topic: Document(topic, f"the house of {topic} is near the river. " * 40) for topic in TOPICS}


def computed(answers: list[Generation]) -> int:
    return sum(answer.stats.num_prompt_tokens - answer.stats.num_cached_tokens for answer in answers)


def test_a_batch_has_the_answers_of_single_requests_and_computes_fewer_tokens(
    small: Engine, questions: list[str], tmp_path: Path
) -> None:
    pages = documents()
    prompts: list[Prompt] = [PromptLayout().messages([pages[text.split()[-1]]], text) for text in questions]
    own = [small.generate(prompt, max_tokens=8) for prompt in prompts]
    small.cache.purge()
    ordered = small.batch(prompts, max_tokens=8, max_concurrency=2)
    assert [answer.text for answer in ordered] == [answer.text for answer in own]
    assert computed(ordered) < 0.6 * computed(own)

    small.cache.purge()
    with DocumentStore.create(tmp_path / "store", index="flat") as store:
        store.add(pages.values())
    batch, output = tmp_path / "questions.jsonl", tmp_path / "answers.jsonl"
    batch.write_text("".join(json.dumps({"question": text}) + "\n" for text in questions))
    arguments = ["batch", str(batch), "--store", str(tmp_path / "store"), "--output", str(output), "--k", "1"]
    options = ["--url", small.base_url, "--max-tokens", "8", "--max-concurrency", "2", "--json"]
    result = CliRunner(env={"RAGCACHE_API_KEY": small.api_key}).invoke(cli, [*arguments, *options])
    assert result.exit_code == 0, result.stderr
    records = {record["custom_id"]: record for record in map(json.loads, output.read_text().splitlines())}
    bodies = [records[f"line-{number}"]["response"]["body"] for number in range(1, len(questions) + 1)]
    assert [body["choices"][0]["message"]["content"] for body in bodies] == [answer.text for answer in own]
    summary = json.loads(result.stdout)
    assert summary["num_prompt_tokens"] - summary["num_cached_tokens"] < 0.6 * computed(own)
