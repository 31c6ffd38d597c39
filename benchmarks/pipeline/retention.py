"""What hints bring to agents that wait for tools, while single questions fill the same GPU KV cache.

Each agent's prompt grows by the answer and the tool's result. With ``retain_s`` a request asks for as long as the tool
takes, which is known here. With ``tool`` it names the tool alone: one of five, which usually take 0.5 to 15 s. All arms
get the same prompts and questions at the same times, from an empty cache. The engine has seen other agents before.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from benchmarks.engines import BLOCK_SIZE, block_bytes, cached_share, launch
from benchmarks.report import BenchmarkPlan, Figure, Part, percentiles_ms
from benchmarks.searches import DocumentTexts
from ragcache_core.client import Engine, Generation
from ragcache_core.config import CacheConfig
from ragcache_core.prompt import ChatMessage, PromptLayout

_NUM_AGENTS = 6
_TASK_WORDS, _RESULT_WORDS = 120, 40
_TOOLS_S = (0.5, 1.0, 2.0, 5.0, 15.0)
_SPREAD = (0.8, 1.25)
_SLACK_S = 1.0
_STARTS_S = 6.0
_ARMS = ("none", "retain_s", "tool")
_SEEN_SEED = 1_000
_QUESTIONS_PER_S = 8.0
_NUM_DOCUMENTS = 200
_DOCUMENT_WORDS = 120
_MAX_TOKENS = 12
_CACHE_TOKENS = 16_384


@dataclass(slots=True)
class _AgentsRun:
    """The answers of one arm: of each agent by its turns, and those to single questions."""

    turns: dict[int, list[Generation]] = field(default_factory=dict)
    singles: list[Generation] = field(default_factory=list)

    @property
    def later_turns(self) -> list[Generation]:
        return [answer for number in sorted(self.turns) for answer in self.turns[number][1:]]


def measure_retention(plan: BenchmarkPlan) -> Part:
    """Run each arm for three seeds on an engine of its own, and compare the agents' later turns and all requests."""
    texts = (
        DocumentTexts(plan.corpus, _TASK_WORDS),
        DocumentTexts(plan.corpus, _RESULT_WORDS),
        DocumentTexts(plan.corpus, _DOCUMENT_WORDS),
    )
    runs: dict[str, list[_AgentsRun]] = {arm: [] for arm in _ARMS}
    num_retained = 0
    for arm in _ARMS:
        with _launch(plan) as engine:  # what one arm names, another would have learned
            for round_ in range(plan.sized(4, 2)):
                plan.report(f"retention: {arm}, {f'seed {round_}' if round_ else 'before'}")
                engine.cache.purge()
                seed = plan.seed + (round_ or _SEEN_SEED)
                scene = _Scene(engine, texts, seed, plan.sized(6, 2) * (1 if round_ else 3), arm)
                found = asyncio.run(scene.run())
                num_retained = max(num_retained, scene.num_retained)
                runs[arm] += [found] if round_ else []
    figures = [
        *_figures("retention", runs["retain_s"], runs["none"], f"most tokens retained: {num_retained:,}"),
        *_figures("tool_names", runs["tool"], runs["none"], "tools by name, nothing retained"),
    ]
    details = {
        arm: [{"turns": _ttfts_s(run.later_turns), "singles_median_s": median(_ttfts_s(run.singles))} for run in of]
        for arm, of in runs.items()
    }
    return Part("before: agents of another seed, whose answers do not count", tuple(figures), details)


def _figures(name: str, hinted: Sequence[_AgentsRun], plain: Sequence[_AgentsRun], note: str) -> list[Figure]:
    """Return an arm's figures; baseline: the arm without hints."""
    turns, hinted_turns = _later_turns(plain), _later_turns(hinted)
    singles, hinted_singles = _singles(plain), _singles(hinted)
    p50, p99 = percentiles_ms(_ttfts_s(hinted_turns))
    note = f"{len(hinted_turns)} later turns, {len(plain)} seeds; {note}"
    by_seed = [
        f"{_share(b.later_turns):.3f} over {_share(a.later_turns):.3f}" for a, b in zip(plain, hinted, strict=True)
    ]
    differing = sum(a.text != b.text for a, b in zip(turns, hinted_turns, strict=True))
    return [
        Figure(f"{name}_turns_cached", _share(hinted_turns), _share(turns), note="; ".join(by_seed)),
        Figure(f"{name}_turns_ttft_ms", _mean_ms(hinted_turns), _mean_ms(turns), p50, p99, note=note),
        Figure(f"{name}_singles_cached", _share(hinted_singles), _share(singles), note=f"{len(singles)} questions"),
        Figure(f"{name}_all_ttft_ms", _mean_ms(hinted_turns + hinted_singles), _mean_ms(turns + singles)),
        Figure(f"{name}_mismatches", differing),
    ]


def _later_turns(runs: Sequence[_AgentsRun]) -> list[Generation]:
    return [answer for run in runs for answer in run.later_turns]


def _singles(runs: Sequence[_AgentsRun]) -> list[Generation]:
    return [answer for run in runs for answer in run.singles]


@dataclass(slots=True)
class _Scene:
    """Agents and single questions on an engine, all drawn from one seed."""

    engine: Engine
    texts: tuple[DocumentTexts, DocumentTexts, DocumentTexts]
    seed: int
    num_turns: int
    arm: str
    num_retained: int = 0

    async def run(self) -> _AgentsRun:
        found = _AgentsRun()
        asking = asyncio.ensure_future(self._ask_singles(found))
        await asyncio.gather(*(self._work(number, found) for number in range(_NUM_AGENTS)))
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        return found

    async def _work(self, number: int, found: _AgentsRun) -> None:
        tasks, results, _ = self.texts
        rng = random.Random(f"{self.seed} {number}")
        first = 1_000 * self.seed + 100 * number
        messages: list[ChatMessage] = [{"role": "user", "content": tasks.document(first).text}]
        await asyncio.sleep(rng.uniform(0.0, _STARTS_S))
        for turn in range(self.num_turns):
            tool_s = rng.choice(_TOOLS_S)
            wait_s = tool_s * rng.uniform(*_SPREAD)
            hints: dict[str, Any] = {"retain_s": wait_s + _SLACK_S, "tool": f"tool of {tool_s} s"}
            hint = {name: value for name, value in hints.items() if name == self.arm}
            answer = await self.engine.agenerate(messages, max_tokens=_MAX_TOKENS, **hint)
            found.turns.setdefault(number, []).append(answer)
            messages.append({"role": "assistant", "content": answer.text})
            messages.append({"role": "user", "content": results.document(first + turn + 1).text})
            await asyncio.sleep(wait_s)
            if number == 0:
                self.num_retained = max(self.num_retained, (await self.engine.astats()).num_retained_tokens)

    async def _ask_singles(self, found: _AgentsRun) -> None:
        """Ask questions at times and about documents of the seed until it is cancelled."""
        documents = self.texts[2]
        rng, layout, asked = random.Random(self.seed), PromptLayout(), set[asyncio.Future[None]]()

        async def ask(prompt: Sequence[ChatMessage]) -> None:
            found.singles.append(await self.engine.agenerate(prompt, max_tokens=_MAX_TOKENS))

        at_s = time.monotonic()
        try:
            while True:
                at_s += rng.expovariate(_QUESTIONS_PER_S)
                shown = [documents.document(rng.randrange(_NUM_DOCUMENTS)) for _ in range(2)]
                prompt = layout.messages(shown, f"Who founded number {rng.randrange(1_000)}?")
                await asyncio.sleep(at_s - time.monotonic())
                asked.add(asyncio.ensure_future(ask(prompt)))
        finally:
            await asyncio.gather(*asked)


def _launch(plan: BenchmarkPlan) -> Engine:
    num_bytes = _CACHE_TOKENS // BLOCK_SIZE * block_bytes(plan.model)
    return launch(plan.model, CacheConfig(kv_cache_bytes=num_bytes, block_size=BLOCK_SIZE, host_bytes=0))


def _ttfts_s(answers: Sequence[Generation]) -> list[float]:
    return [answer.stats.ttft_s or 0.0 for answer in answers]


def _mean_ms(answers: Sequence[Generation]) -> float:
    return round(1000 * fmean(_ttfts_s(answers)), 2)


def _share(answers: Sequence[Generation]) -> float:
    return round(cached_share([answer.stats for answer in answers]), 4)
