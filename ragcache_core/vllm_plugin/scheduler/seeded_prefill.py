"""Seeded requests whose prompt is computed in several steps, without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vllm.platforms import current_platform

from ragcache_core.vllm_plugin.compat import platform_worker
from ragcache_core.vllm_plugin.refusals import check_engine
from ragcache_core.vllm_plugin.rendezvous import PrivateRendezvous

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class EarlyRejection:
    """Mixin of a platform's worker: rejects an unsupported engine before loading its model."""

    def __init__(self, *, vllm_config: VllmConfig, **kwargs: Any) -> None:
        if str(vllm_config.scheduler_config.scheduler_cls).endswith(".RAGCacheScheduler"):
            check_engine(vllm_config)
        super().__init__(vllm_config=vllm_config, **kwargs)  # type: ignore[call-arg]


class SparingSeeds:
    """Mixin of a platform's worker: an incomplete prompt consumes no random state of its seed.

    vLLM draws a token for every request of a step, throws it away where the prompt goes on in another step, and turns
    that request's generator back. A processor's generator cannot be turned back, which ended the engine.
    """

    model_runner: Any

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        if not current_platform.is_cpu():
            return super().sample_tokens(*args, **kwargs)  # type: ignore[misc]
        with without_cut_prompts(self.model_runner):
            return super().sample_tokens(*args, **kwargs)  # type: ignore[misc]


class SeededWorker(EarlyRejection, PrivateRendezvous, SparingSeeds, platform_worker()):  # type: ignore[misc]
    """The worker for ``--worker-cls``; with another one, only seeds without a GPU differ."""


@contextmanager
def without_cut_prompts(model_runner: Any) -> Iterator[None]:
    """Inside, a model runner does not use the generators of requests with incomplete prompts."""
    batch = model_runner.input_batch
    if not batch.generators:
        yield
        return
    is_cut = model_runner.discard_request_mask.np[: batch.num_reqs]
    aside = {i: batch.generators.pop(i) for i in list(batch.generators) if is_cut[i]}
    try:
        yield
    finally:
        batch.generators.update(aside)
