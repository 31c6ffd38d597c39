"""A model's attention layers for chunk reuse, or the name of an unsupported feature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ragcache_core.errors import ConfigError
from ragcache_core.vllm_plugin.chunks.model import rope
from ragcache_core.vllm_plugin.chunks.model.paged_kv import KVAccess
from ragcache_core.vllm_plugin.chunks.model.position_free_kv import UnrotatedKV
from ragcache_core.vllm_plugin.chunks.model.rope import Rope


@dataclass(slots=True)
class AttentionLayer:
    """One layer: vLLM's attention, its decoder layer, and its part of the paged cache, with and without RoPE."""

    name: str
    attention: Any
    decoder: torch.nn.Module
    kv: KVAccess
    unrotated: UnrotatedKV


def attention_layers(model: torch.nn.Module, forward_context: dict[str, Any]) -> list[AttentionLayer]:
    """Return the layers of a model with an allocated KV cache, in order.

    Args:
        model: the model as vLLM built it.
        forward_context: vLLM's own attention layers by name.

    Raises:
        ConfigError: chunk reuse cannot be done with this model; the message names what it is.
    """
    if (reason := unsupported_model(model, forward_context)) is not None:
        raise ConfigError(f"chunk reuse does not work with {reason}: leave CacheConfig.chunk_reuse out")
    found = []
    for name, attention in _attentions(forward_context):
        decoder, rotary = _place(model, attention)
        kv = KVAccess(attention)
        found.append(AttentionLayer(name, attention, decoder, kv, UnrotatedKV(Rope(rotary), kv)))
    return found


def unsupported_model(model: torch.nn.Module, forward_context: dict[str, Any]) -> str | None:
    """Return the feature that prevents chunk reuse on a model; ``None`` if there is none."""
    others = [layer for layer in forward_context.values() if hasattr(layer, "kv_cache") and not _is_plain(layer)]
    if others:
        return f"layers of type {type(others[0]).__name__} (compressed or recurrent attention)"
    attentions = _attentions(forward_context)
    if not attentions:
        return "a model without attention layers"
    for _, attention in attentions:
        if (reason := _unsupported_attention(attention)) is not None:
            return reason
        decoder, rotary = _place(model, attention)
        if decoder is None:
            return f"{type(model).__name__}, whose layers are no list"
        if rotary is None:
            return f"{type(model).__name__}, whose attention has no rotary embedding"
        if (reason := rope.unsupported(rotary, attention.head_size)) is not None:
            return reason
    return None


def _is_plain(layer: Any) -> bool:
    return all(hasattr(layer, name) for name in ("impl", "num_heads", "num_kv_heads", "head_size", "kv_cache_dtype"))


def _attentions(forward_context: dict[str, Any]) -> Sequence[tuple[str, Any]]:
    found = [(name, layer) for name, layer in forward_context.items() if hasattr(layer, "kv_cache")]
    return sorted(found, key=lambda item: [int(part) for part in item[0].split(".") if part.isdigit()])


def _unsupported_attention(attention: Any) -> str | None:
    impl, kind = attention.impl, type(attention).__name__
    if kind not in {"Attention"}:
        return f"layers of type {kind}"
    if attention.kv_cache_dtype not in {"auto", "bfloat16", "float16", "float32"}:
        return f"a KV cache of dtype {attention.kv_cache_dtype}"
    if getattr(attention, "kv_sharing_target_layer_name", None):
        return "layers that share the KV of others"
    if getattr(attention, "sliding_window", None) not in {None, -1}:
        return "sliding windows"
    if getattr(impl, "alibi_slopes", None) is not None:
        return "ALiBi"
    if getattr(impl, "sinks", None) is not None:
        return "attention sinks"
    if not hasattr(impl, "do_kv_cache_update"):
        return f"the attention backend {attention.get_attn_backend().get_name()}"
    cache = attention.kv_cache
    if not isinstance(cache, torch.Tensor) or cache.dim() != 4 or cache.shape[-1] != 2 * attention.head_size:
        return f"the KV cache of the attention backend {attention.get_attn_backend().get_name()}"
    return None


def _place(model: torch.nn.Module, attention: Any) -> tuple[Any, Any]:
    """Return decoder layer and rotary module of an attention layer; ``None`` for a missing one."""
    names = {id(module): name for name, module in model.named_modules()}
    parts = names.get(id(attention), "").split(".")
    decoder = rotary = None
    for depth in range(len(parts) - 1, 0, -1):
        around = model.get_submodule(".".join(parts[:depth]))
        rotary = rotary if rotary is not None else getattr(around, "rotary_emb", None)
        parent = model.get_submodule(".".join(parts[: depth - 1]))
        if isinstance(parent, torch.nn.ModuleList):
            decoder = around
            break
    return decoder, rotary
