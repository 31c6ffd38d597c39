"""Ask tiny models of several families over all tiers, and print what came of it as JSON.

``python -m tests.engine.vllm_plugin.family_facts DIRECTORY FAMILY ...``: each is asked by plain vLLM without a prefix
cache, by an engine whose tiers are too small for what it is asked, and by the next one on the same disk.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import random
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "1")
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # so small a model is slower on two threads than on one
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

from ragcache_core.types import Tier
from ragcache_core.vllm_plugin.compat import kv_bytes_per_block
from tests.support.tiny_models import VOCABULARY, make

BLOCK = 32
KV_CACHE_DTYPES = {"qwen3_moe": "fp8"} if "avx512f" in Path("/proc/cpuinfo").read_text(encoding="utf-8") else {}
"""How the KV of a family is kept, where not as it is computed; vLLM asks an x86 CPU for AVX-512."""
NUM_LOGPROBS = 5
_LENGTHS = (121, 250, 310, 163, 278, 93, 350, 220)
_POPULARITY = [1 / (i + 1) for i in range(len(_LENGTHS))]
_VOCABULARY = range(5, VOCABULARY)

Asked = tuple[list[int], list[dict[str, Any]], int]
"""Tokens, documents, and how many tokens to answer with."""


class Family:
    """An engine over a tiny model, in this process: ours, or plain vLLM where no request finds another's blocks."""

    def __init__(
        self,
        model: Path,
        *,
        num_blocks: int,
        host_bytes: int = 0,
        disk: Mapping[str, Any] | None = None,
        kv_cache_dtype: str = "auto",
    ) -> None:
        self._is_plain = not host_bytes
        ours: dict[str, Any] = {}
        if host_bytes:
            extra: dict[str, Any] = {
                "cpu_bytes_to_use": host_bytes,
                "spec_name": "RAGCacheSpec",
                "spec_module_path": "ragcache_core.vllm_plugin.offload.spec",
                "ragcache": {},
            }
            if disk is not None:
                tier = {"type": "DiskTier", "module_path": "ragcache_core.vllm_plugin.disk.manager", **disk}
                extra["secondary_tiers"] = [tier]
            ours = {
                "scheduler_cls": "ragcache_core.vllm_plugin.scheduler.RAGCacheScheduler",
                "worker_cls": "ragcache_core.vllm_plugin.scheduler.seeded_prefill.SeededWorker",
                "kv_transfer_config": {
                    "kv_connector": "RAGCacheConnector",
                    "kv_connector_module_path": "ragcache_core.vllm_plugin.connector",
                    "kv_role": "kv_both",
                    "kv_load_failure_policy": "recompute",
                    "kv_connector_extra_config": extra,
                },
            }
        self.llm = LLM(
            model=str(model),
            skip_tokenizer_init=True,
            dtype="float32",
            kv_cache_dtype=kv_cache_dtype,
            enforce_eager=True,
            block_size=BLOCK,
            enable_prefix_caching=True,
            max_model_len=1024,
            max_num_seqs=6,
            max_num_batched_tokens=512,
            num_gpu_blocks_override=num_blocks,
            max_logprobs=NUM_LOGPROBS,
            disable_log_stats=True,
            **ours,
        )
        self._salts = count()
        self.num_preempted = 0
        self._count_preemptions()

    def _count_preemptions(self) -> None:
        preempt = self.scheduler._preempt_request

        def counting(*args: Any, **kwargs: Any) -> None:
            self.num_preempted += 1
            preempt(*args, **kwargs)

        self.scheduler._preempt_request = counting

    @property
    def scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def block_bytes(self) -> int:
        return kv_bytes_per_block(self.scheduler.kv_cache_config)

    def ask(self, asked: Sequence[Asked]) -> list[Any]:
        """Return the answers to requests that come at the same time."""
        prompts = [TokensPrompt(prompt_token_ids=tokens) for tokens, _, _ in asked]
        for prompt in prompts if self._is_plain else ():
            prompt["cache_salt"] = str(next(self._salts))
        sampling = [
            SamplingParams(
                max_tokens=num_tokens,
                temperature=0,
                logprobs=NUM_LOGPROBS,
                ignore_eos=True,
                detokenize=False,
                extra_args={"kv_transfer_params": {"ragcache": {"version": 1, "documents": documents}}},
            )
            for _, documents, num_tokens in asked
        ]
        return [output.outputs[0] for output in self.llm.generate(prompts, sampling, use_tqdm=False)]

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm


def requests(seed: int, num_requests: int) -> list[Asked]:
    """Return requests about popular documents, with short and long answers; some go on with what was asked before."""
    rng = random.Random(0)
    documents = [[rng.choice(_VOCABULARY) for _ in range(length)] for length in _LENGTHS]
    rng = random.Random(seed)
    asked: list[Asked] = []
    for _ in range(num_requests):
        if asked and rng.random() < 0.2:
            tokens, places, _ = rng.choice(asked[-6:])
            if len(tokens) < 700:
                asked.append(([*tokens, *(rng.choice(_VOCABULARY) for _ in range(40))], places, 3))
                continue
        tokens, places = [7] * 20, []
        for number in dict.fromkeys(rng.choices(range(len(documents)), _POPULARITY, k=rng.randint(1, 3))):
            if len(tokens) + len(documents[number]) < 800:
                places.append({"id": f"d{number}", "start": len(tokens), "end": len(tokens) + len(documents[number])})
                tokens = [*tokens, *documents[number]]
        tokens = [*tokens, *(rng.choice(_VOCABULARY) for _ in range(rng.randint(3, 60)))]
        asked.append((tokens, places if rng.random() < 0.8 else [], rng.choice([3, 3, 3, 40])))
    return asked


def differences(ours: Sequence[Any], plain: Sequence[Any]) -> tuple[int, float]:
    """Return how many answers differ, and by how much the likeliest tokens' log probabilities do at most."""
    num_different, worst = 0, 0.0
    for a, b in zip(ours, plain, strict=True):
        num_different += list(a.token_ids) != list(b.token_ids)
        for here, there in zip(a.logprobs, b.logprobs, strict=True):
            worst = max([worst, *(abs(here[t].logprob - there[t].logprob) for t in here.keys() & there.keys())])
    return num_different, worst


def in_batches(engine: Family, asked: Sequence[Asked]) -> list[Any]:
    rng, answers, first = random.Random(3), [], 0
    while first < len(asked):
        size = rng.randint(1, 8)
        answers += engine.ask(asked[first : first + size])
        first += size
    return answers


def measure(family: str, directory: Path, num_requests: int = 16) -> dict[str, Any]:
    """Return what came of one family."""
    model, folder = make(family, directory), directory / f"{family}-kv"
    gc.freeze()
    kv_cache_dtype = KV_CACHE_DTYPES.get(family, "auto")
    plain = Family(model, num_blocks=600, kv_cache_dtype=kv_cache_dtype)
    asked, long = requests(1, num_requests), [(tokens, places, 130) for tokens, places, _ in requests(2, 6)]
    expected = [*in_batches(plain, asked), *plain.ask(long)]
    specs = [group.kv_cache_spec for group in plain.scheduler.kv_cache_config.kv_cache_groups]
    groups = Counter(type(spec).__name__ for spec in specs)
    num_groups = groups.total()
    block_bytes = plain.block_bytes
    plain.close()
    facts: dict[str, Any] = {
        "groups": groups,
        "kv cache dtype": kv_cache_dtype,
        "kv dtypes": sorted({str(spec.dtype) for spec in specs}),
        "distinct tokens": len({token for answer in expected for token in answer.token_ids}),
    }
    for start in ("first", "second"):
        engine = Family(
            model,
            num_blocks=1 + max(26 * num_groups, 40),
            host_bytes=40 * num_groups * block_bytes,
            disk={"directory": str(folder), "capacity_bytes": 400 * num_groups * block_bytes},
            kv_cache_dtype=kv_cache_dtype,
        )
        counters = engine.scheduler.connector.controller.counters
        answers = [*in_batches(engine, asked), *engine.ask(long)]
        num_different, worst = differences(answers, expected)
        controller = engine.scheduler.connector.controller
        facts[start] = {
            "different": num_different,
            "worst": worst,
            "tokens": {tier.label: counters.num_tokens_by_tier[tier] for tier in Tier},
            "evicted": {tier.label: controller.tree.tiers[tier].num_evicted_units for tier in Tier},
            "preempted": engine.num_preempted,
            "tiers": controller.report()["tiers"],
        }
        engine.close()
    return facts


if __name__ == "__main__":
    logging.captureWarnings(True)
    where, *families = sys.argv[1:]
    with mock.patch("gc.unfreeze"):  # vLLM collects all garbage a dozen times for each engine, and modules are none
        print(json.dumps({family: measure(family, Path(where)) for family in families}))
