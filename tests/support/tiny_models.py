"""Models of many families with random weights, a few layers each, made on the spot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

VOCABULARY = 512
WINDOW = 96
"""Tokens that a sliding window looks back."""

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def make(family: str, folder: Path) -> Path:
    """Write a model of a family into a new folder, and return it."""
    import torch

    path = folder / family
    torch.manual_seed(0)
    model = FAMILIES[family]().float().eval()
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.dim() > 1 and "embed" not in name:
                weights.mul_(4)  # else all answers are equal
    model.save_pretrained(path)
    return path


def gemma3() -> Any:
    """Five layers that look a window back for one that looks everywhere."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    layers = ["sliding_attention"] * 5 + ["full_attention"]
    return Gemma3ForCausalLM(
        Gemma3TextConfig(**_COMMON, num_hidden_layers=6, sliding_window=WINDOW, layer_types=layers)
    )


def gpt_oss() -> Any:
    """Every other layer looks a window back; experts, and attention sinks."""
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        **_COMMON,
        num_hidden_layers=4,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    return GptOssForCausalLM(config)


def llama4() -> Any:
    """Layers that attend to chunks for one that attends to all; experts."""
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    config = Llama4TextConfig(
        **_COMMON,
        num_hidden_layers=4,
        intermediate_size_mlp=128,
        num_local_experts=2,
        attention_chunk_size=WINDOW,
        interleave_moe_layer_step=1,
    )
    return Llama4ForCausalLM(config)


def qwen3_moe() -> Any:
    """A mixture of experts, with full attention."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        **_COMMON, num_hidden_layers=2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64
    )
    return Qwen3MoeForCausalLM(config)


FAMILIES: dict[str, Callable[[], Any]] = {
    function.__name__: function for function in (gemma3, gpt_oss, llama4, qwen3_moe)
}
