"""The attention of the 12-layer demo model in a plain forward pass, layer by layer: what an engine does not keep."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.chunks.ablations import MODEL
from ragcache_core.chunk.types import ChunkSpan, chunk_spans
from ragcache_core.prompt import PromptLayout
from ragcache_core.quality import Question

_LAYOUT = PromptLayout()


@dataclass(frozen=True, slots=True)
class AttendedPrompt:
    """A prompt's attention.

    Attributes:
        layers: [layers, tokens, tokens], averaged over heads.
        spans: the documents.
    """

    layers: torch.Tensor
    spans: list[ChunkSpan]


def attended(question: Question) -> AttendedPrompt:
    """Return the attention in the prompt of a question; what is behind the last document is the question's."""
    model, tokenizer = _model()
    messages = _LAYOUT.messages(question.documents, question.text)
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    firsts = [first for first, _ in encoded["offset_mapping"]]
    places, found = [], 0
    for document in question.documents:
        shown = _LAYOUT.document_text(document)
        found = text.index(shown, found)
        inside = [token for token, first in enumerate(firsts) if found <= first < found + len(shown)]
        places.append((inside[0], inside[-1] + 1))
    with torch.inference_mode():
        layers = model(torch.tensor([encoded["input_ids"]]), output_attentions=True).attentions
    return AttendedPrompt(
        torch.stack([layer[0].mean(0) for layer in layers]), chunk_spans(encoded["input_ids"], places)
    )


@cache
def _model() -> tuple[Any, Any]:
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, attn_implementation="eager")
    return model.eval(), AutoTokenizer.from_pretrained(MODEL)
