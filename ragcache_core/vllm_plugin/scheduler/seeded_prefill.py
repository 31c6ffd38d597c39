"""Requests with a seed whose prompt is computed in several steps, on a machine without a GPU."""

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
    """What a platform's worker gets in addition: an engine that our scheduler refuses does not load its model first."""

    def __init__(self, *, vllm_config: VllmConfig, **kwargs: Any) -> None:
        if str(vllm_config.scheduler_config.scheduler_cls).endswith(".RAGCacheScheduler"):
            check_engine(vllm_config)
        super().__init__(vllm_config=vllm_config, **kwargs)  # type: ignore[call-arg]


class SparingSeeds:
    """What a platform's worker gets in addition: a prompt that is not read to its end takes nothing from its seed.

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
    """The worker to name to ``--worker-cls``; with any other everything works, too, but seeds without a GPU."""


@contextmanager
def without_cut_prompts(model_runner: Any) -> Iterator[None]:
    """Inside, the generators of requests whose prompt goes on in another step are not among a model runner's."""
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
