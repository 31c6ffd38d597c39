"""A Llama with random weights: its answers are noise, its prefill times are realistic.

The model is a pure function of its shape, so it is made once and kept in the user's cache folder. NumPy alone draws the
weights: nothing here needs torch. A large one is made without, and vLLM draws them itself (``--load-format dummy``).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import platformdirs

from ragcache_core.errors import ConfigError
from ragcache_core.private_files import FOLDER_MODE, make_once

_VERSION = 1
"""Part of a model's name, changed with the generator."""
_STANDARD_DEVIATION = 0.02
_NUM_SPECIAL = 3
_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %} {{ message['role'] }} {{ message['content'] }}{% endfor %}"
)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a Llama; by default 30 million parameters, and 8 KiB of KV per token in float32.

    Raises:
        ConfigError: sizes that no Llama can have.
    """

    hidden_size: int = 512
    num_layers: int = 8
    num_heads: int = 8
    num_kv_heads: int = 2
    intermediate_size: int = 1536
    vocab_size: int = 6_144
    max_tokens: int = 8_192
    seed: int = 0

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_heads or self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"hidden_size {self.hidden_size}, num_heads {self.num_heads}, num_kv_heads {self.num_kv_heads}: "
                "each must be a multiple of the next"
            )

    @property
    def num_parameters(self) -> int:
        """Weights of the model, embeddings included."""
        return sum(int(np.prod(shape)) for _, shape in _weights(self))

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


LLAMA_3_8B = ModelShape(
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    intermediate_size=14_336,
    vocab_size=128_256,
    max_tokens=131_072,
)
"""Llama-3.1-8B: 8 billion parameters, 16 GiB of them and 128 KiB of KV a token in bfloat16: for a GPU."""


def random_model(shape: ModelShape = ModelShape(), folder: Path | None = None, *, has_weights: bool = True) -> Path:
    """Return the folder of a model of that shape in Hugging Face format, created at the first call.

    Atomic: a folder that is there is whole. ``folder`` holds such models, by default one in the user's cache folder.
    Without weights an engine loads it with ``--load-format dummy`` alone.

    Raises:
        OSError: the folder cannot be written to.
    """
    config = {"version": _VERSION, **asdict(shape), **({} if has_weights else {"has_weights": False})}
    digest = hashlib.blake2b(json.dumps(config, sort_keys=True).encode(), digest_size=6).hexdigest()
    folder = folder or Path(platformdirs.user_cache_dir("ragcache")) / "models"
    path = folder / f"random-llama-{shape.num_parameters / 1e6:.0f}m-{digest}"
    return make_once(path, partial(_write, shape, has_weights))


def _write(shape: ModelShape, has_weights: bool, folder: Path) -> None:
    folder.mkdir(FOLDER_MODE)
    if has_weights:
        _write_weights(shape, folder / "model.safetensors")
    _write_json(folder / "config.json", _config(shape))
    _write_json(folder / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2})
    _write_json(folder / "tokenizer.json", _tokenizer(shape.vocab_size))
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    settings = {**special, "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": _CHAT_TEMPLATE}
    _write_json(folder / "tokenizer_config.json", {**settings, "model_max_length": shape.max_tokens})


def _write_weights(shape: ModelShape, path: Path) -> None:
    from safetensors.numpy import save_file

    rng = np.random.default_rng(shape.seed)
    weights = {}
    for name, size in _weights(shape):
        drawn = rng.standard_normal(size, dtype=np.float32) * np.float32(_STANDARD_DEVIATION)
        weights[name] = np.ones(size, np.float32) if len(size) == 1 else drawn
    save_file(weights, path, metadata={"format": "pt"})


def _weights(shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, kv = shape.hidden_size, shape.num_kv_heads * shape.head_dim
    yield "model.embed_tokens.weight", (shape.vocab_size, hidden)
    for i in range(shape.num_layers):
        layer = f"model.layers.{i}"
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.self_attn.q_proj.weight", (hidden, hidden)
        yield f"{layer}.self_attn.k_proj.weight", (kv, hidden)
        yield f"{layer}.self_attn.v_proj.weight", (kv, hidden)
        yield f"{layer}.self_attn.o_proj.weight", (hidden, hidden)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
        yield f"{layer}.mlp.gate_proj.weight", (shape.intermediate_size, hidden)
        yield f"{layer}.mlp.up_proj.weight", (shape.intermediate_size, hidden)
        yield f"{layer}.mlp.down_proj.weight", (hidden, shape.intermediate_size)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (shape.vocab_size, hidden)


def _config(shape: ModelShape) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "max_position_embeddings": shape.max_tokens,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default"},
        "tie_word_embeddings": False,
        "vocab_size": shape.vocab_size,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "use_cache": True,
    }


def _tokenizer(vocab_size: int) -> dict[str, object]:
    """Return a tokenizer with one token per word: ``w17`` is number 17."""
    special = ["<s>", "</s>", "<pad>"]
    words = [*special, *(f"w{i}" for i in range(_NUM_SPECIAL, vocab_size))]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": word, **flags} for i, word in enumerate(special)],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {word: i for i, word in enumerate(words)}, "unk_token": "<pad>"},
    }


def _write_json(path: Path, data: dict[str, object]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
