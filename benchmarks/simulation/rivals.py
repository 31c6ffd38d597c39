"""The default policy beside those that others compare with: on every trace, from little of what is distinct to most.

Requests come one at a time, so that none waits for another and TTFT is what prefill and transfers cost. A figure is
what the default policy has over what the best of its rivals has, at the capacity where that is worst. Where there are
several seeds, both are means over them, and the interval is 95 % of a bootstrap over seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

import numpy as np

from benchmarks.papers.ratios import DEFAULT_POLICY, Summary
from benchmarks.report import BenchmarkPlan, Figure, Goal, Part
from benchmarks.simulated import simulate_runs
from benchmarks.simulated.laboratory import LabOptions
from ragcache_core.sim.options import BELADY
from ragcache_core.sim.sweep import SweepRun
from ragcache_core.sim.sweep import plan as plan_runs
from ragcache_core.sim.traces.reuse import reuse_of
from ragcache_core.sim.traces.trace import Trace, read_trace, write_trace
from ragcache_core.sim.traces.workload import WORKLOADS, make_trace

RIVALS = ("lru", "lfu", "gdsf", "pgdsf", "s3fifo", "arc")
DOCUMENTS = ("mmlu", "nq", "sysx", "drift")
HISTORIES = ("conversation", "agents")
IMPORTED = Path("build/traces")
"""Traces that ``ragcache trace import`` wrote to this folder, ``NAME.jsonl``, are measured beside those made here."""
TIERS = {"gpu": (8, 0, 0), "tiers": (1, 3, 4), "host": (3, 5, 0)}
"""How many eighths of a capacity are on GPU, host and disk."""
_SHARES = (0.01, 0.03, 0.1, 0.3, 0.6)
_FIRST_SEED = 2  # policies were tuned on seed 1
_NUM_SEEDS = 5
"""Of each workload of documents; each of the others takes as long as all these."""
_NUM_RESAMPLES = 2_000
_NUM_REQUESTS = 6_000
_NUM_OF_HISTORIES = 3_000
_HISTORY_BLOCK = 32
"""Tokens of a block: an answer of an agent fills several, and a prompt of a conversation has some hundreds."""
_GAP_S = 1_000.0

ByPolicy = Mapping[str, Sequence[Summary]]
"""For each policy a summary for each seed."""
ByShare = Mapping[float, ByPolicy]
"""For each share of the distinct tokens."""


def goals() -> dict[str, Goal]:
    """Return what the default policy has to reach: on what is made here, and on the imported traces that there are."""
    names = (*DOCUMENTS, *HISTORIES, *(path.stem for path in _imported()))
    return {
        f"{name}_{what}_of_best_{tiers}": goal
        for name, tiers in product(names, TIERS)
        for what, goal in (("hit", Goal(">=", 0.99)), ("ttft", Goal("<=", 1.01)))
    }


def measure_policies(plan: BenchmarkPlan) -> Part:
    """Compare the default policy with the best of its rivals at every capacity, on GPU alone and on more tiers."""
    return _measure(plan, "policies", _made(plan, DOCUMENTS, _NUM_REQUESTS, 1 if plan.is_quick else _NUM_SEEDS))


def measure_histories(plan: BenchmarkPlan) -> Part:
    """Do the same where prompts begin with a conversation's history, in blocks."""
    return _measure(plan, "histories", _made(plan, HISTORIES, _NUM_OF_HISTORIES, 1))


def measure_imported(plan: BenchmarkPlan) -> Part:
    """Do the same with imported traces."""
    num_requests = plan.sized(_NUM_REQUESTS, 200)
    return _measure(plan, "imported", ((path.stem, read_trace(path).head(num_requests)) for path in _imported()))


def _measure(plan: BenchmarkPlan, part: str, traces: Iterable[tuple[str, Trace]]) -> Part:
    runs: dict[tuple[str, str, float], list[SweepRun]] = {}
    num_to_do = 0
    with TemporaryDirectory(prefix="ragcache-rivals-") as folder:
        for number, (name, trace) in enumerate(traces):
            plan.report(f"{part}: {name}")
            path = Path(folder) / f"{name}-{number}.jsonl"
            write_trace(one_by_one(trace), path)
            num_distinct = distinct_tokens(trace)
            for tiers, share in product(TIERS, (0.1, 0.6) if plan.is_quick else _SHARES):
                options = _options(tiers, round(share * num_distinct), trace)
                if options.granularity == "block" and options.gpu_tokens < longest_prompt(trace):
                    continue  # vLLM rejects such a prompt
                policies = (DEFAULT_POLICY, *RIVALS, *((BELADY,) if tiers == "gpu" else ()))
                of = plan_runs([path], options, policies=policies)
                runs.setdefault((name, tiers, share), []).extend(of)
                num_to_do += len(of) * len(trace)
        done = iter(simulate_runs(plan, part, [run for of in runs.values() for run in of], num_to_do))
    results: dict[tuple[str, str], dict[float, dict[str, list[Summary]]]] = {}
    for (name, tiers, share), of in runs.items():
        by_policy = results.setdefault((name, tiers), {}).setdefault(share, {})
        for run in of:
            by_policy.setdefault(run.options.policy, []).append(next(done).summary)
    return Part(
        f"an eighth of the requests; seeds from {_FIRST_SEED + plan.seed} on of what is made",
        tuple(figure for (name, tiers), of in results.items() for figure in figures_of(name, tiers, of)),
        {f"{name}, {tiers}": _details(by_share) for (name, tiers), by_share in results.items()},
    )


def one_by_one(trace: Trace) -> Trace:
    """Return the same prompts so far apart that none waits for another.

    Each has an answer of one token, except in conversations, whose next prompt begins with the answer.
    """
    arrival_s = np.arange(len(trace), dtype=np.float64) * _GAP_S
    output_tokens = np.where(trace.conversation < 0, 1, trace.output_tokens).astype(np.int32)
    return replace(trace, arrival_s=arrival_s, output_tokens=output_tokens)


def distinct_tokens(trace: Trace) -> int:
    """Return the tokens that an endless cache of prefixes would hold in the end."""
    return round(int(trace.doc_tokens.sum(dtype=np.int64)) * (1 - reuse_of(trace).same_prefix_tokens))


def figures_of(name: str, tiers: str, by_share: ByShare) -> Iterator[Figure]:
    """Yield the worst ratio of token hit rates, the worst of mean TTFT, and the mean share of Belady's hits."""
    yield _worst(f"{name}_hit_of_best_{tiers}", by_share, "token_hit_rate", best=max, worst=min)
    yield _worst(f"{name}_ttft_of_best_{tiers}", by_share, "mean_ttft_s", best=min, worst=max)
    if all(BELADY in by_policy for by_policy in by_share.values()):
        ratios = {
            share: fmean(ours["token_hit_rate"] for ours in by_policy[DEFAULT_POLICY])
            / fmean(bound["token_hit_rate"] for bound in by_policy[BELADY])
            for share, by_policy in by_share.items()
        }
        note = "by capacity: " + ", ".join(f"{share:.0%} {ratio:.3f}" for share, ratio in ratios.items())
        yield Figure(f"{name}_hit_of_belady_{tiers}", round(fmean(ratios.values()), 4), baseline=1.0, note=note)


_Choice = Callable[[Iterable[tuple[float, str]]], tuple[float, str]]


def _worst(key: str, by_share: ByShare, measure: str, *, best: _Choice, worst: _Choice) -> Figure:
    ratios = []
    for share, by_policy in by_share.items():
        values = {policy: [summary[measure] for summary in of] for policy, of in by_policy.items()}
        ours = values[DEFAULT_POLICY]
        theirs, rival = best((fmean(values[policy]), policy) for policy in RIVALS)
        ratio = fmean(ours) / theirs if theirs else 1.0  # where no rival finds anything, none is ahead
        note = f"at {share:.0%}: {fmean(ours):.3f} against {theirs:.3f} of {rival}"
        if len(ours) > 1 and theirs:
            low, high = bootstrapped(ours, values[rival])
            note += f" ({low:.3f} to {high:.3f} times in 95 %)"
        ratios.append((ratio, note))
    ratio, note = worst(ratios)
    return Figure(key, round(ratio, 4), baseline=1.0, note=note)


def bootstrapped(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """Return the interval of the ratio of means that 95 % of resampled pairs have."""
    drawn = np.random.default_rng(0).integers(len(ours), size=(_NUM_RESAMPLES, len(ours)))
    ratios = np.asarray(ours)[drawn].sum(axis=1) / np.maximum(np.asarray(theirs)[drawn].sum(axis=1), 1e-12)
    low, high = np.quantile(ratios, (0.025, 0.975))
    return float(low), float(high)


def longest_prompt(trace: Trace) -> int:
    """Return the tokens of the longest prompt with its answer, and of the blocks that it fills in part."""
    documents = np.add.reduceat(np.append(trace.doc_tokens, 0), trace.first[:-1]) * (np.diff(trace.first) > 0)
    tokens = trace.history_tokens + documents + trace.question_tokens + trace.output_tokens
    return int(tokens.max()) + 2 * _HISTORY_BLOCK


def _options(tiers: str, num_tokens: int, trace: Trace) -> LabOptions:
    """Return a run's options: whole documents, or blocks where there are histories."""
    gpu, host, disk = (num_tokens * eighths // 8 for eighths in TIERS[tiers])
    has_histories = bool((trace.conversation >= 0).any())
    options = LabOptions(gpu_tokens=gpu, host_tokens=host, disk_tokens=disk, retrieval_s=0.0, warm_up=len(trace) // 8)
    return replace(options, granularity="block", block_size=_HISTORY_BLOCK) if has_histories else options


def _made(plan: BenchmarkPlan, names: Iterable[str], num_requests: int, num_seeds: int) -> Iterator[tuple[str, Trace]]:
    for name, seed in product(names, range(num_seeds)):
        yield name, make_trace(WORKLOADS[name], plan.sized(num_requests, 200), _FIRST_SEED + plan.seed + seed)


def _imported() -> list[Path]:
    return sorted(IMPORTED.glob("*.jsonl"))


def _details(by_share: ByShare) -> dict[str, dict[str, dict[str, float]]]:
    keys = ("token_hit_rate", "mean_ttft_s")
    return {
        f"{share:.0%}": {
            policy: {key: round(fmean(summary[key] for summary in of), 5) for key in keys}
            for policy, of in by_policy.items()
        }
        for share, by_policy in by_share.items()
    }
