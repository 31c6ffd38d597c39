"""The prompts that each engine answers while it is measured: about 3,900 tokens, and answers of one token."""

from __future__ import annotations

import random
from dataclasses import dataclass

from ragcache_core.bench.prompts import TokenRequest
from ragcache_core.types import PromptSegment, SegmentKind
from ragcache_core.wire import encode_kv_transfer_params, tile

_NUM_DOCUMENTS = 8
_DOCUMENT_TOKENS = 480
_QUESTION_TOKENS = 20
_FIRST_NEW = 1000
_TOKENS = range(10, 1000)


@dataclass(frozen=True, slots=True)
class ServerScenario:
    """Requests of one kind.

    Args:
        name: the scene's name, which is also part of the seed of its questions.
        is_cached: whether every request has the same documents, or each has new ones.
        num_warm_up: requests before the measured ones.
        sends_documents: whether requests to RAGCache say which of their tokens are which document.
    """

    name: str
    is_cached: bool
    num_warm_up: int
    sends_documents: bool = True

    def make_request(self, number: int) -> TokenRequest:
        """Return a prompt of eight documents and the question with this number."""
        first = 0 if self.is_cached else _FIRST_NEW + _NUM_DOCUMENTS * number
        tokens, segments = [3] * 16, []
        for document in range(first, first + _NUM_DOCUMENTS):
            start = len(tokens)
            tokens += _random_tokens(f"document {document}", _DOCUMENT_TOKENS)
            segments.append(PromptSegment(SegmentKind.DOCUMENT, start, len(tokens), f"doc-{document}"))
        tokens += _random_tokens(f"{self.name} {number}", _QUESTION_TOKENS)
        return TokenRequest(tuple(tokens), encode_kv_transfer_params(tile(segments, len(tokens))), 1)


def _random_tokens(seed: str, count: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(_TOKENS.start, _TOKENS.stop) for _ in range(count)]


# New prompts come first: they fill the GPU KV cache, so that each further one evicts one.
SCENES = (
    ServerScenario("new", is_cached=False, num_warm_up=40),
    ServerScenario("hit", is_cached=True, num_warm_up=4),
    ServerScenario("hit, no documents", is_cached=True, num_warm_up=4, sends_documents=False),
)
