"""Write a checkpoint as a Hugging Face model folder: `LlamaForCausalLM` in bf16 with its tokenizer.

The folder is written beside the target and swapped in, so a reader never sees half a model.

Examples:
  python -m examples.demo_model_training.export --checkpoint build/demo.pt --out examples/demo_model
"""

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from examples.demo_model_training.model import DemoLlama, ModelConfig
from examples.demo_model_training.tokenizer import BOS_ID, EOS_ID, PAD, Vocabulary, huggingface_tokenizer
from examples.demo_model_training.train import load_model

MAX_NUM_TOKENS: Final = 4096
KEPT_FILES: Final = ("README.md", "evaluation.json")
"""Written by hand or by `evaluate`; carried over when the weights are exported again."""

_CHAT_TEMPLATE: Final = Path(__file__).with_name("chat_template.jinja")
_OUTER_NAMES: Final = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_BLOCK_NAMES: Final = {
    "attention_norm": "input_layernorm",
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.o_proj",
    "feed_forward_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def huggingface_names(num_layers: int) -> dict[str, str]:
    """Return our parameter name -> the name in `LlamaForCausalLM`."""
    names = dict(_OUTER_NAMES)
    for layer in range(num_layers):
        for ours, theirs in _BLOCK_NAMES.items():
            names[f"blocks.{layer}.{ours}.weight"] = f"model.layers.{layer}.{theirs}.weight"
    return names


def config_json(config: ModelConfig) -> dict[str, object]:
    """Return the content of config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": BOS_ID,
        "dtype": "bfloat16",
        "eos_token_id": EOS_ID,
        "head_dim": config.head_width,
        "hidden_act": "silu",
        "hidden_size": config.width,
        "initializer_range": 0.02,
        "intermediate_size": config.feed_forward_width,
        "max_position_embeddings": MAX_NUM_TOKENS,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "pad_token_id": Vocabulary().ids[PAD],
        "rms_norm_eps": config.norm_epsilon,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": config.vocabulary_size,
    }


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_tokenizer(folder: Path) -> None:
    """Write the tokenizer's files and its chat template into the folder."""
    template = _CHAT_TEMPLATE.read_text(encoding="utf-8")
    huggingface_tokenizer(template, MAX_NUM_TOKENS).save_pretrained(str(folder))


def export(model: DemoLlama, out: Path) -> None:
    """Write the model folder `out`, replacing an earlier one (its `KEPT_FILES` stay)."""
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    folder.chmod(0o755)
    names = huggingface_names(model.config.num_layers)
    weights = {names[name]: weight.to(torch.bfloat16).contiguous() for name, weight in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    _write_json(folder / "config.json", config_json(model.config))
    token_ids = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": Vocabulary().ids[PAD]}
    _write_json(folder / "generation_config.json", {**token_ids, "do_sample": False})
    write_tokenizer(folder)
    for name in KEPT_FILES:
        if (out / name).exists():
            shutil.copy2(out / name, folder / name)
    replaced = folder.with_name(folder.name + "-old")
    if out.exists():
        out.rename(replaced)
    folder.rename(out)
    shutil.rmtree(replaced, ignore_errors=True)


def load_exported(folder: Path) -> DemoLlama:
    """Return the model of an exported folder, its bf16 weights as float32, in evaluation mode."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model = DemoLlama(
        ModelConfig(
            vocabulary_size=config["vocab_size"],
            width=config["hidden_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=config["num_attention_heads"],
            num_kv_heads=config["num_key_value_heads"],
            head_width=config["head_dim"],
            feed_forward_width=config["intermediate_size"],
            rope_theta=config["rope_parameters"]["rope_theta"],
            norm_epsilon=config["rms_norm_eps"],
        )
    )
    weights: dict[str, Tensor] = load_file(folder / "model.safetensors")
    names = huggingface_names(model.config.num_layers)
    model.load_state_dict({ours: weights[theirs].float() for ours, theirs in names.items()})
    model.eval()
    return model


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True, help="checkpoint written by train")
    parser.add_argument("--out", type=Path, required=True, help="model folder to write")
    return parser.parse_args(arguments)


def main() -> None:
    arguments = parse_arguments()
    export(load_model(arguments.checkpoint), arguments.out)


if __name__ == "__main__":
    main()
