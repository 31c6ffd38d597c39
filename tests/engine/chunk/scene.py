"""An engine with chunk reuse over the demo model, and prompts of documents of random tokens for it."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "1")

from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

from ragcache_core.vllm_plugin.connector.tiered_connector import RAGCacheConnector
from tests.conftest import DEMO_MODEL

_LENGTHS = (61, 90, 47, 73, 128, 33, 64, 100)
_VOCABULARY = range(5, 1150)
SEPARATOR = (7,)
NUM_LOGPROBS = 20

FULL: Mapping[str, Any] = {"selection": "cache_craft", "alpha": 1e9, "max_recompute": 1.0}
"""Every token that is not just as a prefill makes it is computed."""
WHOLLY: Mapping[str, Any] = {"selection": "whole_chunks", "alpha": 1e9, "max_recompute": 1.0}
"""Every token of a chunk that is not just as a prefill makes it."""
NOTHING: Mapping[str, Any] = {"selection": "cache_craft", "alpha": 0.0}
"""No token of a stored chunk is computed."""
PART: Mapping[str, Any] = {"selection": "cache_craft", "alpha": 1e9, "max_recompute": 0.3}
"""30 % are."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Token ids, and of each place the log probabilities of the likeliest tokens."""

    tokens: tuple[int, ...]
    logprobs: tuple[Mapping[int, float], ...]

    def distance(self, other: Answer, *, is_prefix: bool = False) -> float:
        """Return by how much log probabilities differ at most; infinity if the tokens do.

        With ``is_prefix`` it may be shorter than ``other``.
        """
        length = len(self.tokens) if is_prefix else len(other.tokens)
        if self.tokens != other.tokens[:length]:
            return float("inf")
        pairs = zip(self.logprobs, other.logprobs[:length], strict=True)
        return max(abs(a[token] - b[token]) for a, b in pairs for token in a.keys() & b.keys())


class Scene:
    """An engine in this process, or in one of its own."""

    def __init__(
        self,
        *,
        dtype: str = "float32",
        connector: str = "EagerDocumentConnector",
        host_bytes: int = 64 << 20,
        num_blocks: int = 200,
        is_compiled: bool = False,
        cache: Mapping[str, Any] | None = None,
        disk: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        all_of_it = {"share": 1.0, "is_default": False}
        extra: dict[str, Any] = {"ragcache": {"host_bytes": 32 << 20, "chunk_reuse": all_of_it, **(cache or {})}}
        self._has_host = "RAGCache" in connector
        if self._has_host:
            extra |= {
                "cpu_bytes_to_use": host_bytes,
                "spec_name": "RAGCacheSpec",
                "spec_module_path": "ragcache_core.vllm_plugin.offload.spec",
            }
        if disk is not None:
            tier = {"type": "DiskTier", "module_path": "ragcache_core.vllm_plugin.disk.manager", **disk}
            extra["secondary_tiers"] = [tier]
        self.llm = LLM(
            model=str(DEMO_MODEL),
            dtype=dtype,
            enforce_eager=not is_compiled,
            max_model_len=2048,
            block_size=32,
            num_gpu_blocks_override=num_blocks,
            max_logprobs=NUM_LOGPROBS,
            disable_log_stats=True,
            worker_cls="ragcache_core.vllm_plugin.chunks.worker.RAGCacheWorker",
            scheduler_cls="ragcache_core.vllm_plugin.scheduler.RAGCacheScheduler",
            kv_transfer_config={
                "kv_connector": connector,
                "kv_connector_module_path": "tests.engine.chunk.connectors",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": extra,
            },
            **settings,
        )
        rng = random.Random(0)
        self.documents = [[rng.choice(_VOCABULARY) for _ in range(length)] for length in _LENGTHS]
        self._system = [rng.choice(_VOCABULARY) for _ in range(40)]
        self._question = [rng.choice(_VOCABULARY) for _ in range(21)]

    @property
    def scheduler(self) -> Any:
        """vLLM's scheduler, of an engine in this process."""
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def scheduling(self) -> Any:
        """The scheduler's side of chunk reuse, of an engine in this process."""
        return self.scheduler.connector.scheduling

    def prompt(
        self, order: Sequence[int], question: int = 0, between: Sequence[int] = SEPARATOR
    ) -> tuple[list[int], list[dict[str, Any]]]:
        """Return the tokens of a prompt, and where its documents lie; ``between`` follows each."""
        tokens, places = list(self._system), []
        for number in order:
            document = self.documents[number]
            places.append({"id": f"d{number}", "start": len(tokens), "end": len(tokens) + len(document)})
            tokens += [*document, *between]
        return [*tokens, *self._question, 5 + question], places

    def request(
        self,
        order: Sequence[int],
        reuse: Any = None,
        *,
        question: int = 0,
        between: Sequence[int] = SEPARATOR,
        answer: Sequence[int] = (),
        salt: str | None = None,
        max_tokens: int = 6,
        spans: Sequence[tuple[int, int]] | None = None,
    ) -> tuple[TokensPrompt, SamplingParams]:
        """Return a request as vLLM takes it.

        ``reuse`` None is a plain one, ``answer`` goes on with a conversation, ``spans`` lie about its documents, and
        one with a ``salt`` of its own finds nothing that is cached.
        """
        tokens, places = self.prompt(order, question, between)
        tokens += answer
        if spans is not None:
            places = [{"id": f"d{i}", "start": start, "end": end} for i, (start, end) in enumerate(spans)]
        metadata = {"version": 1, "documents": places, **({} if reuse is None else {"chunk_reuse": reuse})}
        sampling = SamplingParams(
            max_tokens=max_tokens,
            temperature=0,
            logprobs=NUM_LOGPROBS,
            ignore_eos=True,
            extra_args={"kv_transfer_params": {"ragcache": metadata}},
        )
        prompt = TokensPrompt(prompt_token_ids=tokens)
        if salt is not None:
            prompt["cache_salt"] = salt
        return prompt, sampling

    def ask(self, *requests: tuple[TokensPrompt, SamplingParams]) -> list[Answer]:
        """Return the answers to requests that come at the same time."""
        prompts, sampling = [prompt for prompt, _ in requests], [parameters for _, parameters in requests]
        return [answer_of(output.outputs[0]) for output in self.llm.generate(prompts, sampling, use_tqdm=False)]

    def ask_one(self, order: Sequence[int], reuse: Any = None, **how: Any) -> Answer:
        """Return the answer to one request."""
        return self.ask(self.request(order, reuse, **how))[0]

    def forget_everything(self) -> None:
        """Empty the exact prefix cache in all tiers, and forget the chunks; a disk of theirs is used no more."""
        assert self.llm.reset_prefix_cache(reset_connector=True)

    def forget_exact(self, *, keeps_host: bool = False) -> None:
        """Empty the exact prefix cache, in host memory too unless that ``keeps_host``; the chunks stay."""
        assert self.llm.reset_prefix_cache()
        if self._has_host and not keeps_host:
            with self.scheduler.keeping_weights():
                RAGCacheConnector.reset_cache(self.scheduler.connector)
            RAGCacheConnector.forget_weights(self.scheduler.connector)


def answer_of(output: Any) -> Answer:
    """Return one of vLLM's completions."""
    likely = tuple({token: each.logprob for token, each in place.items()} for place in output.logprobs)
    return Answer(tuple(output.token_ids), likely)
