"""The server's own tokenizer and chat template, put together for clients that have neither."""

from __future__ import annotations

from typing import Any

from ragcache_core.runtime.tokenizer_files import TokenizerFiles
from ragcache_core.vllm_plugin.compat import chat_template_of


def read_tokenizer_files(serving: Any) -> bytes | str:
    """Return what a client tokenises with as ``serving`` does, vLLM's ``ServingTokenization``, or why there is none.

    It is the tokenizer as it was loaded, not the model's files: transformers mends some while it loads them.
    """
    tokenizer = serving.renderer.get_tokenizer()
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return f"it is a {type(tokenizer).__name__}, which runs in Python alone"
    layout = chat_template_of(serving)
    if layout is None:
        return "this model's chats are laid out by vLLM's own code, not by a chat template"
    template, wraps_text = layout
    settings = dict(serving.default_chat_template_kwargs)
    return TokenizerFiles(
        backend.to_str(), dict(tokenizer.special_tokens_map), template, settings, wraps_text
    ).to_bytes()
