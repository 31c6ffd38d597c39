"""Three documents, a question about them, and what the beginning of a prompt that shows them must hold."""

from collections.abc import Sequence

from ragcache_core.prompt import RenderedPrompt
from ragcache_core.types import Document, SegmentKind

DOCUMENTS = [
    Document("sun", "The sun is a star, and every planet goes around it."),
    Document("moon", "The moon goes around the earth once in a month."),
    Document("mars", "Mars is red, and two small moons go around it."),
]
QUESTION = "What goes around the earth in a month?"


def check_prefix(prefix: RenderedPrompt | None, whole: RenderedPrompt, documents: Sequence[Document]) -> RenderedPrompt:
    """A prefix is the beginning of the request, with the same documents, and lacks little more than the question."""
    assert prefix is not None
    num_tokens = len(prefix.token_ids)
    assert prefix.token_ids == whole.token_ids[:num_tokens]
    assert [s.doc_id for s in prefix.segments if s.kind is SegmentKind.DOCUMENT] == [d.doc_id for d in documents]
    starts = [s.start for s in whole.segments if s.kind is SegmentKind.DOCUMENT]
    assert [s.start for s in prefix.segments if s.kind is SegmentKind.DOCUMENT] == starts
    last = [s for s in whole.segments if s.kind is SegmentKind.DOCUMENT][-1]
    assert num_tokens >= last.end - 1
    return prefix
