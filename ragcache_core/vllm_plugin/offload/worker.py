"""vLLM's worker, which leaves the connector alone in a step without anything to copy.

vLLM asks the worker's connector ten things in each step, which takes half a percent of a short one.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from ragcache_core.vllm_plugin.compat import KVConnectorModelRunnerMixin, platform_worker
from ragcache_core.vllm_plugin.offload.compat import NothingToCopy
from ragcache_core.vllm_plugin.offload.idle_copier import CopyingInSpareTime
from ragcache_core.vllm_plugin.scheduler.seeded_prefill import SparingSeeds

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput


class QuietModelRunner(KVConnectorModelRunnerMixin):
    """What differs in a model runner; takes over one that is built."""

    @classmethod
    def take_over(cls, model_runner: KVConnectorModelRunnerMixin) -> None:
        """Make ``model_runner`` one of this class too, before its first step."""
        own = type(model_runner)
        model_runner.__class__ = type(own.__name__, (cls, own), {})

    @staticmethod
    def maybe_get_kv_connector_output(
        scheduler_output: SchedulerOutput, defer_finalize: bool = False
    ) -> AbstractContextManager[KVConnectorOutput | None]:
        # who defers the end calls the connector once more, which must know the step then
        if not defer_finalize and isinstance(scheduler_output.kv_connector_metadata, NothingToCopy):
            return nullcontext()
        asked: AbstractContextManager[KVConnectorOutput | None] = (
            KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(scheduler_output, defer_finalize=defer_finalize)
        )
        return asked


class QuietWorker(SparingSeeds, CopyingInSpareTime, platform_worker()):  # type: ignore[misc]
    """The worker to name to ``--worker-cls``; with any other everything works, too, but seeds without a GPU.

    vLLM's second model runner has a connector of its own kind, and is left as it is.
    """

    model_runner: Any

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        super().initialize_from_config(kv_cache_config)
        if isinstance(self.model_runner, KVConnectorModelRunnerMixin):
            QuietModelRunner.take_over(self.model_runner)
