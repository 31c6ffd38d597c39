"""A tiny model with random weights that listens: Qwen2-Audio's architecture over the demo model's tokenizer."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, Qwen2AudioConfig, Qwen2AudioProcessor, WhisperFeatureExtractor

from tests.conftest import DEMO_MODEL

_AUDIO = ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
_SECONDS, _MEL_BINS = 4, 16
_CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}"
    + "".join((_AUDIO[1], _AUDIO[0], _AUDIO[2]))
    + "{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


def write_listening_model(folder: Path) -> Path:
    """Write its configuration, tokenizer and processor into ``folder``; vLLM makes weights with load_format="dummy"."""
    tokenizer = AutoTokenizer.from_pretrained(str(DEMO_MODEL))
    tokenizer.add_special_tokens({"additional_special_tokens": list(_AUDIO)})
    config = Qwen2AudioConfig(
        audio_config={
            "num_mel_bins": _MEL_BINS,
            "encoder_layers": 1,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 32,
            "d_model": 32,
            "max_source_positions": _SECONDS * 50,
        },
        text_config={
            "model_type": "qwen2",
            "vocab_size": len(tokenizer),
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
        },
        audio_token_index=tokenizer.convert_tokens_to_ids(_AUDIO[0]),
        architectures=["Qwen2AudioForConditionalGeneration"],
    )
    config.save_pretrained(folder)
    extractor = WhisperFeatureExtractor(feature_size=_MEL_BINS, chunk_length=_SECONDS)
    Qwen2AudioProcessor(extractor, tokenizer, chat_template=_CHAT_TEMPLATE).save_pretrained(folder)
    return folder
