"""What ``ragcache compile`` brings to an engine that has just started, and what its forecast says of that.

The first half of a list of questions is the log that the command compiles from. The second half is asked of two
engines, one after the other: with an empty shared folder, and with the compiled one. The command's forecast splits the
log once more: it picks from the first quarter of all questions, and replays the second.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from click.testing import CliRunner

from benchmarks.engines import BLOCK_SIZE, cached_share, launch
from benchmarks.pipeline.batch import NUM_SHOWN, PageBatch, make_page_batch
from benchmarks.report import BenchmarkPlan, Figure, Part, percentiles_ms
from ragcache_core.cli import cli
from ragcache_core.client import Generation
from ragcache_core.config import CacheConfig
from ragcache_core.retrieval import DocumentStore

_SIZES = {"kv_cache_bytes": "256MiB", "host_bytes": "512MiB", "block_size": BLOCK_SIZE}
_VLLM_ARGS = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "2048")
_MAX_TOKENS = 16


@dataclass(frozen=True, slots=True)
class _StartRun:
    """The first answers of one engine."""

    answers: Sequence[Generation]

    @property
    def cached_share(self) -> float:
        return cached_share([answer.stats for answer in self.answers])

    @property
    def ttfts_s(self) -> list[float]:
        return [answer.stats.ttft_s or 0.0 for answer in self.answers]


def measure_compiled(plan: BenchmarkPlan) -> Part:
    """Compile from a log, then compare the first requests after a start."""
    batch = make_page_batch(plan.sized(160, 40), plan.seed)  # half of them are the log, whose forecast takes 20
    num_logged = len(batch.questions) // 2
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plan.report("compiled: ragcache compile")
        began_s = time.monotonic()
        compiled = _compile(plan.model, batch, num_logged, folder)
        compile_s = time.monotonic() - began_s
        num_bytes = sum(path.stat().st_size for path in (folder / "kv").rglob("*") if path.is_file())
        prompts = batch.prompts(batch.retrieved)[num_logged:]
        runs = []
        for shared in (folder / "empty", folder / "kv"):
            plan.report(f"compiled: the first requests with {shared.name}")
            with launch(plan.model, CacheConfig(shared=shared.as_uri(), **_SIZES)) as engine:
                engine.remember_documents(batch.pages.values())
                engine.generate([{"role": "user", "content": "Hello"}], max_tokens=1)  # compiles, and connects
                runs.append(_StartRun([engine.generate(prompt, max_tokens=_MAX_TOKENS) for prompt in prompts]))
    empty, full = runs
    p50, p99 = percentiles_ms(full.ttfts_s)
    empty_p50, empty_p99 = percentiles_ms(empty.ttfts_s)
    ratio = median(a / b for a, b in zip(full.ttfts_s, empty.ttfts_s, strict=True))
    forecast = compiled["forecasts"][-1]
    mismatches = sum(a.text != b.text for a, b in zip(full.answers, empty.answers, strict=True))
    note = f"{len(prompts)} questions after {num_logged} in the log; p99 {empty_p99:g} ms without"
    return Part(
        "none: each engine has just started",
        (
            Figure("compiled_cached_share", round(full.cached_share, 4), round(empty.cached_share, 4), note=note),
            Figure(
                "compiled_forecast_share",
                round(forecast["warm"]["cached_share"], 4),
                round(full.cached_share, 4),
                note=f"{forecast['num_requests']} questions of the log after those picked from; baseline: measured",
            ),
            Figure("compiled_ttft_ms", p50, empty_p50, p50, p99, note="as the engine counts it"),
            Figure("compiled_ttft_ratio", round(ratio, 3), 1.0, note="median over the questions"),
            Figure("compiled_mismatches", mismatches),
            Figure("compile_s", round(compile_s, 1), note=f"{compiled['num_tokens']:,} tokens, with the start"),
            Figure("compiled_bytes", num_bytes, compiled["num_bytes"], note="in the folder; baseline: planned"),
        ),
        {
            "empty_ttft_s": empty.ttfts_s,
            "compiled_ttft_s": full.ttfts_s,
            "forecasts": compiled["forecasts"],
            "receipt": compiled["receipt"],
        },
    )


def _compile(model: str, batch: PageBatch, num_logged: int, folder: Path) -> dict[str, Any]:
    """Run the command over a store of the pages, and return its result.

    Raises:
        RuntimeError: it failed.
    """
    with DocumentStore.create(folder / "store", index="flat") as store:
        store.add(batch.pages.values())
    log = folder / "questions.txt"
    log.write_text("\n".join(question.text for question in batch.questions[:num_logged]), encoding="utf-8")
    options = [text for name, value in _SIZES.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    options += ["--budget", "1GiB", "--shared", (folder / "kv").as_uri(), "--from-log", str(log), "-k", str(NUM_SHOWN)]
    command = ["compile", model, "--store", str(folder / "store"), *options, "--json", "--", *_VLLM_ARGS]
    done = CliRunner().invoke(cli, command)
    if done.exit_code:
        raise RuntimeError(f"ragcache {' '.join(command)} ended with {done.exit_code}: {done.output[-1000:]}")
    return dict(json.loads(done.stdout))
