"""What a model and a trace need: bytes of KV a token, a window that holds every prompt, memory as the paper had it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragcache_core.bench.compare.prompts import TracedPrompts
from ragcache_core.errors import ConfigError

KV_TOKENS = 40_960
HOST_TOKENS = (65_536, 262_144, 1_048_576)
"""RAGCache's KV memory of 5 GiB, and its 8, 32 and 128 GiB of host memory, at 8,192 tokens a GiB (Mistral-7B)."""
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a model's configuration says of its prompts."""

    vocab_size: int
    kv_bytes_per_token: int
    max_tokens: int

    @classmethod
    def read(cls, model: str, dtype: str) -> ModelFacts:
        """Return the facts of a folder in Hugging Face format, or of a name of the hub.

        Raises:
            ConfigError: its configuration cannot be read, or does not name the sizes of its attention.
        """
        config = _config(model)
        try:
            heads = config.get("num_key_value_heads") or config["num_attention_heads"]
            head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
            kv_bytes = config["num_hidden_layers"] * heads * head_dim * 2 * _DTYPE_BYTES[dtype]
            return cls(int(config["vocab_size"]), int(kv_bytes), int(config["max_position_embeddings"]))
        except (KeyError, TypeError) as error:
            raise ConfigError(
                f"the configuration of {model!r} does not say {error}: choose a model of text alone, such as a Llama"
            ) from error

    def memory_bytes(self, num_tokens: int, scale: float, block_size: int) -> int:
        """Return the memory for the KV of ``num_tokens`` times ``scale`` tokens, in whole blocks."""
        num_blocks = max(1, round(num_tokens * scale / block_size))
        return num_blocks * block_size * self.kv_bytes_per_token


def window(
    prompts: Mapping[int, TracedPrompts], facts: ModelFacts, *, num_requests: int, kv_bytes: int, block_size: int
) -> int:
    """Return the context window that the first ``num_requests`` requests of every seed need, in whole blocks.

    Raises:
        ConfigError: one is longer than the model's window or than what the KV memory holds, or a trace is too short.
    """
    longest, where = 0, ""
    for seed, of_seed in prompts.items():
        if len(of_seed) < num_requests:
            raise ConfigError(
                f"the trace has {len(of_seed)} requests, {num_requests} are needed (warm-up, and those of each rate): "
                "lower --requests or --warm-up, give fewer --rates, or a longer trace"
            )
        for number in range(num_requests):
            if (num_tokens := of_seed.num_tokens(number)) > longest:
                longest, where = num_tokens, f"request {number} of seed {seed}"
    limit = min(facts.max_tokens, kv_bytes // facts.kv_bytes_per_token)
    needed = math.ceil((longest + 1) / block_size) * block_size
    if needed > limit:
        what = "the model's window" if limit == facts.max_tokens else "the KV memory"
        raise ConfigError(
            f"{where} has {longest:,} tokens, {what} holds {limit:,}: lower --scale, raise --kv-memory, or choose "
            "another model"
        )
    return needed


def check_host(host_bytes: Sequence[int], facts: ModelFacts, block_size: int) -> None:
    """Refuse host memory that does not hold a block.

    Raises:
        ConfigError: with the least size that does.
    """
    least = block_size * facts.kv_bytes_per_token
    for size in host_bytes:
        if size < least:
            raise ConfigError(f"host memory of {size:,} bytes: a block of this model's KV takes {least:,}; give more")


def _config(model: str) -> dict[str, Any]:
    path = Path(model).expanduser()
    try:
        if path.is_dir() or path.is_absolute():  # no name of the hub
            config = json.loads((path / "config.json").read_bytes())
        else:
            from transformers import AutoConfig

            config = AutoConfig.from_pretrained(model).to_dict()
    except (OSError, ValueError) as error:
        raise ConfigError(f"the configuration of {model!r} cannot be read ({error!s:.200}): name its folder") from error
    return dict(config)
