"""Recall and precision by layout, processor time by the number of documents."""

from __future__ import annotations

import random
import time
import tracemalloc
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.recognition.layouts import LAYOUTS, SHOWN, documents
from benchmarks.recognition.tokenizers import MeasuredTokenizer, load
from ragcache_core.recognition import (
    PolynomialHash,
    Registration,
    Registry,
    count_edges,
    find_documents,
    text_forms,
)

MIN_OVERLAP = 0.9
"""Share of the union of both spans that a recognised span has in common with the true one."""
_PROMPT_TOKENS = 4000


@dataclass(frozen=True, slots=True)
class Accuracy:
    """What was recognised of the documents that prompts of one layout show."""

    tokenizer: str
    layout: str
    num_shown: int
    num_recognised: int
    num_right: int

    @property
    def recall(self) -> float:
        """Share of the documents that were recognised with the right span."""
        return self.num_right / self.num_shown

    @property
    def precision(self) -> float:
        """Share of the recognised spans that are right."""
        return self.num_right / max(self.num_recognised, 1)


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of recognition with a number of documents, each in three forms.

    ``find_ms`` is processor time for a prompt, ``register_us`` for a document without its tokenising. A document takes
    ``process_bytes``; ``array_bytes`` of them are in arrays.
    """

    num_documents: int
    num_tokens: int
    find_ms: float
    register_us: float
    array_bytes: float
    process_bytes: float
    recall: float


def registered(tokenizer: MeasuredTokenizer, texts: Sequence[str]) -> tuple[PolynomialHash, Registry]:
    """Return a registry of texts, by their position, in all forms."""
    hashing = PolynomialHash.random()
    registry = Registry(hashing, tokenizer.token_bytes)
    for index, text in enumerate(texts):
        forms = [
            registry.make_form(tokenizer.encode(form), count_edges(tokenizer.encode, form)) for form in text_forms(text)
        ]
        registry.add(Registration(str(index), tuple(filter(None, forms))))
    return hashing, registry


def accuracies(name: str, num_prompts: int, seed: int = 5) -> Iterator[Accuracy]:
    """Yield the accuracy of each layout: prompts of 3 to 8 registered documents and up to 2 others, in random order."""
    tokenizer, texts = load(name), documents()
    num_known = len(texts) * 4 // 5
    random.Random(1).shuffle(texts)
    hashing, registry = registered(tokenizer, texts[:num_known])
    for layout, lay_out in LAYOUTS.items():
        rng = random.Random(seed)
        num_shown = num_recognised = num_right = 0
        for _ in range(num_prompts):
            ids = rng.sample(range(num_known), rng.randint(3, 8))
            if rng.random() < 0.2:
                ids[-1] = ids[0]
            ids += rng.sample(range(num_known, len(texts)), rng.randint(0, 2))
            rng.shuffle(ids)
            shown = [SHOWN.get(layout, str)(texts[i]) for i in ids]
            body = lay_out([texts[i] for i in ids])
            prompt = (
                f"[INST] Answer from the documents.\n\n{body}\n\nQuestion: What does it say of {rng.random()}?[/INST]"
            )
            truth = _spans(tokenizer, prompt, shown)
            wanted = {(texts[i], *span) for i, span in zip(ids, truth, strict=True) if i < num_known}
            found = find_documents(hashing, [registry], tokenizer.encode(prompt)).documents
            num_shown += len(wanted)
            num_recognised += len(found)
            for each in found:
                right = next((w for w in wanted if _is_right(texts[int(each.doc_id)], each.start, each.end, w)), None)
                if right is not None:
                    num_right += 1
                    wanted.discard(right)
        yield Accuracy(name, layout, num_shown, num_recognised, num_right)


def _spans(tokenizer: MeasuredTokenizer, prompt: str, shown: Sequence[str]) -> list[tuple[int, int]]:
    """Return the tokens of each text in a prompt, as ``prompt.segment_tokens`` counts them."""
    ends, at, spans = tokenizer.ends_of(prompt), 0, []
    for text in shown:
        at = prompt.index(text, at)
        spans.append((bisect_right(ends, at), bisect_right(ends, at + len(text))))
        at += len(text)
    return spans


def _is_right(text: str, start: int, end: int, wanted: tuple[str, int, int]) -> bool:
    own, first, last = wanted
    common, union = min(end, last) - max(start, first), max(end, last) - min(start, first)
    return own == text and common >= MIN_OVERLAP * union


def _filled(hashing: PolynomialHash, tokenizer: MeasuredTokenizer, texts: Sequence[Any]) -> Registry:
    """Return a registry of texts in three forms each: as they are, and with other tokens at every line's end."""
    registry = Registry(hashing, tokenizer.token_bytes)
    for index, tokens in enumerate(texts):
        shown = [tokens, *(np.insert(tokens, range(40, len(tokens), 60), 2000 + form) for form in range(2))]
        forms = [registry.make_form(each, (1, 2)) for each in shown]
        registry.add(Registration(f"document-{index:08}", tuple(filter(None, forms))))
    return registry


def cost(num_documents: int, num_prompts: int = 100, rounds: int = 3) -> Cost:
    """Return the cost of recognition in prompts of 4,000 tokens, half of them registered documents.

    Documents have 300 to 700 tokens of Tekken: real ones first, then real pieces of 8 to 24 tokens in random order,
    every second with one of 200 common beginnings.
    """
    tokenizer, rng = load("tekken"), random.Random(7)
    real = [np.array(tokenizer.encode(text), np.int32) for text in documents()]
    pieces = [tokens[at : at + 24] for tokens in real for at in range(0, len(tokens) - 24, 24)]
    heads = [rng.choice(pieces) for _ in range(200)]

    def made() -> Any:
        parts, num_tokens = [rng.choice(heads)] if rng.random() < 0.5 else [], 0
        while num_tokens < rng.randint(300, 700):
            parts.append(rng.choice(pieces)[: rng.randint(8, 24)])
            num_tokens += len(parts[-1])
        return np.concatenate(parts)

    texts = [*real, *(made() for _ in range(num_documents - len(real)))][:num_documents]
    tracemalloc.start()
    hashing = PolynomialHash.random()
    registry = _filled(hashing, tokenizer, texts)
    process_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    began = time.process_time()
    _filled(hashing, tokenizer, texts)
    register_s = time.process_time() - began
    prompts, num_shown = [], 0
    for _ in range(num_prompts):
        parts: list[Any] = []
        while sum(map(len, parts)) < _PROMPT_TOKENS:
            is_known = rng.random() < 0.5
            part = rng.choice(texts) if is_known else made()
            if sum(map(len, parts)) + len(part) > _PROMPT_TOKENS:
                part, is_known = part[: _PROMPT_TOKENS - sum(map(len, parts))], False
            num_shown += is_known
            parts.append(part)
        prompts.append(np.concatenate(parts))
    times = []
    for _ in range(rounds):
        began = time.process_time()
        num_found = sum(len(find_documents(hashing, [registry], prompt).documents) for prompt in prompts)
        times.append((time.process_time() - began) / num_prompts)
    return Cost(
        num_documents,
        _PROMPT_TOKENS,
        min(times) * 1e3,
        register_s / len(texts) * 1e6,
        registry.nbytes / len(registry),
        process_bytes / len(registry),
        num_found / max(num_shown, 1),
    )
