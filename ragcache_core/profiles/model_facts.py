"""A model's sizes from its configuration."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragcache_core.errors import ConfigError

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The sizes in a model's configuration."""

    vocab_size: int
    kv_bytes_per_token: int
    max_tokens: int

    @classmethod
    def read(cls, model: str, dtype: str) -> ModelFacts:
        """Return the facts of a folder in Hugging Face format, or of a name on the hub.

        Raises:
            ConfigError: the configuration is not readable, or does not name the sizes of its attention.
        """
        config = _config(model)
        try:
            heads = config.get("num_key_value_heads") or config["num_attention_heads"]
            head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
            kv_bytes = config["num_hidden_layers"] * heads * head_dim * 2 * _DTYPE_BYTES[dtype]
            return cls(int(config["vocab_size"]), int(kv_bytes), int(config["max_position_embeddings"]))
        except (KeyError, TypeError) as error:
            raise ConfigError(
                f"the configuration of {model!r} does not name {error}: choose a text model, such as a Llama"
            ) from error

    def memory_bytes(self, num_tokens: int, scale: float, block_size: int) -> int:
        """Return the bytes of KV of ``num_tokens`` times ``scale`` tokens, in whole blocks."""
        num_blocks = max(1, round(num_tokens * scale / block_size))
        return num_blocks * block_size * self.kv_bytes_per_token


def _config(model: str) -> dict[str, Any]:
    path = Path(model).expanduser()
    try:
        if path.is_dir() or path.is_absolute():  # not a name on the hub
            config = json.loads((path / "config.json").read_bytes())
        else:
            from transformers import AutoConfig

            config = AutoConfig.from_pretrained(model).to_dict()
    except (OSError, ValueError) as error:
        raise ConfigError(f"the configuration of {model!r} cannot be read ({error!s:.200}): name its folder") from error
    return dict(config)
