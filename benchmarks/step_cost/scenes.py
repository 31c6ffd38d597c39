"""What the engines are asked to do while they are timed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.request import Request

from benchmarks.step_cost.loop import EngineLoop
from benchmarks.step_cost.schedulers import BLOCK_TOKENS, SchedulerSpec
from ragcache_core.types import PromptSegment, SegmentKind, Tier
from ragcache_core.wire import encode_kv_transfer_params, tile

_QUESTION_TOKENS = 24


class RequestFactory:
    """Makes requests of numbered documents and a question.

    Args:
        with_documents: whether requests say which of their tokens are which document, as RAGCache's clients do.
    """

    def __init__(self, *, with_documents: bool) -> None:
        self._with_documents = with_documents
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self._num_made = 0

    def make(self, documents: Sequence[tuple[int, int]], num_answer_tokens: int) -> Request:
        """Return a request.

        Args:
            documents: the number of each document, which decides its tokens, and how many tokens it has.
            num_answer_tokens: how many tokens are generated.
        """
        self._num_made += 1
        tokens, segments = [3] * BLOCK_TOKENS, []
        for number, num_tokens in documents:
            start = len(tokens)
            tokens += _random_tokens(number, num_tokens)
            segments.append(PromptSegment(SegmentKind.DOCUMENT, start, len(tokens), f"doc-{number}"))
        tokens += _random_tokens(10**9 + self._num_made, _QUESTION_TOKENS)
        params = SamplingParams(max_tokens=num_answer_tokens, ignore_eos=True)
        if self._with_documents:
            params.extra_args = {"kv_transfer_params": encode_kv_transfer_params(tile(segments, len(tokens)))}
        return Request(f"r{self._num_made}", tokens, params, None, block_hasher=self._hasher)


def _random_tokens(seed: int, count: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(10, 30_000) for _ in range(count)]


class StepLoad(Protocol):
    """Work that is timed in slices."""

    def run(self, count: int) -> None:
        """Do ``count`` units of it: steps or requests."""
        ...


class Decode:
    """Requests are decoded, and nothing else happens."""

    def __init__(self, loop: EngineLoop, requests: RequestFactory, num_requests: int) -> None:
        self._loop = loop
        for i in range(num_requests):
            loop.add(requests.make([(2 * i, 120), (2 * i + 1, 120)], 4000))
        while any(request.is_prefill_chunk or not request.num_output_tokens for request in loop.requests.values()):
            loop.step()
        self.run(8)

    def run(self, count: int) -> None:
        for _ in range(count):
            self._loop.step()


class Mixed:
    """A closed loop of requests of two documents, drawn from 2,000, with answers of 64 tokens."""

    def __init__(self, loop: EngineLoop, requests: RequestFactory, num_requests: int) -> None:
        self._loop, self._requests, self._dice = loop, requests, random.Random(1)
        for _ in range(num_requests):
            self._add()
        self.run(80)

    def run(self, count: int) -> None:
        for _ in range(count):
            self._loop.step()
            for _ in self._loop.finished:
                self._add()
            self._loop.finished.clear()

    def _add(self) -> None:
        numbers = [9_000_000 + int(2000 * self._dice.random() ** 3) for _ in range(2)]
        self._loop.add(self._requests.make([(number, 400) for number in numbers], 64))


class Prompts:
    """Prompts of eight documents and 4,000 tokens, one after the other, with answers of one token.

    Args:
        num_prompts: after how many the first comes again; None: never.
    """

    def __init__(self, loop: EngineLoop, requests: RequestFactory, num_prompts: int | None = None) -> None:
        self._loop, self._requests, self._num_prompts, self._num_made = loop, requests, num_prompts, 0
        for _ in range(max(6, 2 * (num_prompts or 0))):
            self.run(1)
            loop.drain()  # else a slow disk may drop what it should hold

    def run(self, count: int) -> None:
        for _ in range(count):
            self._num_made += 1
            first = 1000 + 8 * (self._num_made if self._num_prompts is None else self._num_made % self._num_prompts)
            self._loop.add(self._requests.make([(first + k, 500) for k in range(8)], 1))
            self._loop.finish_requests()


def fill_cache(loop: EngineLoop, requests: RequestFactory, num_blocks: int) -> None:
    """Fill the GPU KV cache and the host tier with prompts that never return, so that each new block evicts one."""
    for i in range(3 * num_blocks * BLOCK_TOKENS // 2048 + 2):
        loop.add(requests.make([(5_000_000 + 2 * i, 1000), (5_000_001 + 2 * i, 1000)], 1))
        if i % 4 == 3:
            loop.drain()
    loop.drain()


@dataclass(frozen=True, slots=True)
class StepScenario:
    """A load, the engine that it runs on, and how it is cut into slices.

    Args:
        unit: what a figure is about, ``step`` or ``request``.
        slice_size: units that one engine does before it is the next one's turn.
        is_full: whether the caches are filled before.
        hit_tier: that holds the prompts when they come; None: no tier does.
    """

    spec: SchedulerSpec
    start: Callable[[EngineLoop, RequestFactory], StepLoad]
    unit: str = "step"
    slice_size: int = 16
    is_full: bool = False
    hit_tier: Tier | None = None


SCENES: dict[str, StepScenario] = {
    "decode 1": StepScenario(SchedulerSpec(20_000), lambda loop, make: Decode(loop, make, 1)),
    "decode 32": StepScenario(SchedulerSpec(20_000), lambda loop, make: Decode(loop, make, 32)),
    "decode 256": StepScenario(SchedulerSpec(20_000), lambda loop, make: Decode(loop, make, 256)),
    "decode 256, full": StepScenario(SchedulerSpec(12_000), lambda loop, make: Decode(loop, make, 256), is_full=True),
    "decode 256, windows": StepScenario(
        SchedulerSpec(24_000, ("full", "window")), lambda loop, make: Decode(loop, make, 256), is_full=True
    ),
    "mixed 256, full": StepScenario(SchedulerSpec(20_000), lambda loop, make: Mixed(loop, make, 256), is_full=True),
    "prompt 4000, new": StepScenario(SchedulerSpec(20_000), lambda loop, make: Prompts(loop, make), "request", 4),
    "prompt 4000, new, full": StepScenario(
        SchedulerSpec(12_000), lambda loop, make: Prompts(loop, make), "request", 4, is_full=True
    ),
    "prompt 4000, GPU hit": StepScenario(
        SchedulerSpec(20_000), lambda loop, make: Prompts(loop, make, 1), "request", 4, hit_tier=Tier.GPU
    ),
    "prompt 4000, host hit": StepScenario(
        SchedulerSpec(600, host_ratio=10),
        lambda loop, make: Prompts(loop, make, 20),
        "request",
        4,
        hit_tier=Tier.HOST,
    ),
    "prompt 4000, disk hit": StepScenario(
        SchedulerSpec(600, host_ratio=2),  # room for a load while the prompt before is written
        lambda loop, make: Prompts(loop, make, 20),
        "request",
        4,
        hit_tier=Tier.DISK,
    ),
}
