"""Engines that RAGCache does not support: each is rejected by the model's or setting's name, with a reason and a hint.

``docs/reference/errors.md`` lists the lines, and those that other modules raise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragcache_core.errors import ConfigError
from ragcache_core.vllm_plugin.other_connectors import check_other_connectors, children, extra_config, is_own
from ragcache_core.vllm_plugin.settings import PluginSettings

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def check_engine(vllm_config: VllmConfig) -> None:
    """Reject an engine that RAGCache's scheduler does not support.

    Raises:
        ConfigError
    """
    model, transfer = vllm_config.model_config, vllm_config.kv_transfer_config
    connector = None if transfer is None else transfer.kv_connector
    is_among_others = any(map(is_own, children(transfer)))
    if transfer is None or (transfer.kv_connector_module_path is None and not is_among_others):
        raise ConfigError(  # none, or one of vLLM's own
            f"kv_connector is {connector!r}, but RAGCacheScheduler needs a connector of RAGCache, alone or in vLLM's "
            "MultiConnector: set --kv-transfer-config as Engine.launch and 'ragcache serve' do, or leave "
            "--scheduler-cls out"
        )
    if model.is_encoder_decoder:
        raise ConfigError(
            f"{model.model!r} is an encoder-decoder model, for which vLLM has no KV connectors: serve it without "
            "RAGCache (cache=None, 'ragcache serve --no-cache'), or choose a decoder-only model"
        )
    if not vllm_config.cache_config.enable_prefix_caching:
        raise ConfigError(
            f"prefix caching is off for {model.model!r} (--no-enable-prefix-caching, or latent attention on a CPU "
            "without AMX), and behind KV that was kept vLLM would compute something else: switch it on, or serve it "
            "without RAGCache (cache=None, 'ragcache serve --no-cache')"
        )
    settings = PluginSettings.from_extra_config(extra_config(transfer))
    if is_among_others:
        check_other_connectors(vllm_config, approximation=settings.approximation, max_age=settings.max_age)
    policy = vllm_config.scheduler_config.policy
    if policy != "fcfs" and (settings.queue == "cache_aware" or settings.speculates):
        raise ConfigError(
            f"--scheduling-policy is {policy!r}, but RAGCache orders the queue: leave it out, or set queue='fifo' and "
            "max_prefill_bs=0 in the CacheConfig"
        )
