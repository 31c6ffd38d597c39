"""Models whose chunks cannot be moved are refused by the name of what stands against it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ragcache_core.errors import ConfigError
from ragcache_core.vllm_plugin.chunks.model.attention_layers import attention_layers, unsupported_model
from ragcache_core.vllm_plugin.chunks.model.rope import Rope

_HEAD, _BLOCKS, _SIZE = 8, 3, 4


class Rotary(torch.nn.Module):
    """Turns keys as its table says."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.arange(16.0).unsqueeze(1) / torch.arange(1.0, _HEAD // 2 + 1)
        self.cos_sin_cache = torch.cat((angles.cos(), angles.sin()), -1)
        self.rotary_dim, self.is_neox_style, self.dtype = _HEAD, True, torch.float32

    def forward(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        def turned(flat: torch.Tensor) -> torch.Tensor:
            return Rope(self).rotate(flat.unflatten(-1, (-1, _HEAD)), positions).flatten(1)

        return turned(query), turned(key)


class Attention(torch.nn.Module):
    """A layer's attention as vLLM has it."""

    def __init__(self) -> None:
        super().__init__()
        self.impl = SimpleNamespace(do_kv_cache_update=None, alibi_slopes=None, sinks=None)
        self.num_heads, self.num_kv_heads, self.head_size = 4, 2, _HEAD
        self.kv_cache_dtype, self.sliding_window = "auto", None
        self.kv_cache = torch.zeros((_BLOCKS, 2, _SIZE, 2 * _HEAD))

    def get_attn_backend(self) -> Any:
        return SimpleNamespace(get_name=lambda: "SOME_BACKEND")


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = torch.nn.Module()
        self.self_attn.rotary_emb = Rotary()
        self.self_attn.attn = Attention()


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer(), Layer()])

    def context(self) -> dict[str, Any]:
        return {f"layers.{i}.self_attn.attn": layer.self_attn.attn for i, layer in enumerate(self.layers)}


def _attention(model: Model) -> Any:
    return model.layers[1].self_attn.attn


def _sets(**changes: Any) -> Callable[[Model], None]:
    def change(model: Model) -> None:
        for name, value in changes.items():
            setattr(_attention(model), name, value)

    return change


def _sets_impl(**changes: Any) -> Callable[[Model], None]:
    return lambda model: vars(_attention(model).impl).update(changes)


def _is_of_another_kind(model: Model) -> None:
    class ChunkedLocalAttention(Attention):
        pass

    model.layers[1].self_attn.attn = ChunkedLocalAttention()


def _cannot_be_written_to(model: Model) -> None:
    del _attention(model).impl.do_kv_cache_update


def _has_no_rope(model: Model) -> None:
    del model.layers[1].self_attn.rotary_emb


def _has_layers_in_no_list(model: Model) -> None:
    layer = model.layers[0]
    model.layers = torch.nn.Module()
    setattr(model.layers, "0", layer)
    model.context = lambda: {"layers.0.self_attn.attn": layer.self_attn.attn}


def _is_not_the_models_own(model: Model) -> None:
    context = {**model.context(), "draft.0.attn": Attention()}
    model.context = lambda: context


def _turns_otherwise(model: Model) -> None:
    rotary = model.layers[1].self_attn.rotary_emb
    table = rotary.cos_sin_cache.clone()
    rotary.forward = lambda positions, query, key: (query, key)
    rotary.cos_sin_cache = table


def _turns_a_part(model: Model) -> None:
    model.layers[1].self_attn.rotary_emb.head_size = 3


_REASONS: dict[str, tuple[Callable[[Model], None], str]] = {
    "another kind": (_is_of_another_kind, "layers of type ChunkedLocalAttention"),
    "8-bit cache": (_sets(kv_cache_dtype="fp8_e4m3"), "a KV cache of dtype fp8_e4m3"),
    "shared KV": (_sets(kv_sharing_target_layer_name="layers.0"), "layers that share the KV of others"),
    "window": (_sets(sliding_window=4096), "sliding windows"),
    "alibi": (_sets_impl(alibi_slopes=[0.5]), "ALiBi"),
    "sinks": (_sets_impl(sinks=torch.zeros(4)), "attention sinks"),
    "backend": (_cannot_be_written_to, "the attention backend SOME_BACKEND"),
    "cache": (_sets(kv_cache=torch.zeros((2, _BLOCKS, _SIZE, 2, _HEAD))), "the KV cache of the attention backend SOME"),
    "no rope": (_has_no_rope, "Model, whose attention has no rotary embedding"),
    "no list": (_has_layers_in_no_list, "Model, whose layers are no list"),
    "not in the model": (_is_not_the_models_own, "Model, whose layers are no list"),
    "part of a head": (_turns_a_part, "Rotary of 3 numbers in heads of 8"),
    "another rope": (_turns_otherwise, "Rotary, which does not turn keys as its table says"),
}


def test_a_model_whose_every_layer_is_plain_is_supported() -> None:
    model = Model()
    assert unsupported_model(model, model.context()) is None


@pytest.mark.parametrize("reason", _REASONS)
def test_a_model_is_refused_by_the_name_of_what_one_layer_has(reason: str) -> None:
    change, said = _REASONS[reason]
    model = Model()
    change(model)
    assert said in str(unsupported_model(model, model.context()))
    with pytest.raises(ConfigError, match=r"chunk reuse does not work with .*: leave CacheConfig\.chunk_reuse out"):
        attention_layers(model, model.context())
