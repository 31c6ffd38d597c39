"""A request as vLLM cuts it: blocks of tokens over the whole prompt, each with a key that covers all before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from ragcache_core.sim.traces.trace import TracedRequest
from ragcache_core.tree import PathSegment

_DIGEST_BYTES = 12
_POSITION_BITS = 32


@dataclass(frozen=True, slots=True)
class DocumentUnits:
    """The blocks ``[first, last)`` that stand for a document in the tree, and how many must be cached for a hit."""

    first: int
    last: int

    @property
    def num_needed(self) -> int:
        """Blocks of the prompt that must be cached; a document without a block of its own lies in the next one."""
        return max(self.last, self.first + 1)


@dataclass(frozen=True, slots=True)
class PromptBlocks:
    """The full blocks of a prompt and of the answer to it.

    Attributes:
        keys: of the prompt's blocks, then of the answer's as far as its KV is computed: all but its last token's.
        num_prompt_tokens, num_tokens: of the prompt; of both.
        path: what they are in the tree.
        documents: where each document lies.
    """

    keys: Sequence[int]
    num_prompt_tokens: int
    num_tokens: int
    path: Sequence[PathSegment]
    documents: Sequence[DocumentUnits]


def cut_into_blocks(
    request: TracedRequest,
    number: int | None,
    *,
    system_tokens: int,
    block_size: int,
    max_cached_documents: int | None = None,
) -> PromptBlocks:
    """Return the blocks of a request: system prompt, documents, question, and the answer's.

    ::

        tokens    system | document 1     | document 2  | question    | answer
        blocks    [ 0 ][ 1 ][ 2 ][ 3 ][ 4 ][ 5 ][ 6 ][ 7 ][ 8 ][ 9 ][ 10 ]
        path      [system][ document 1   ][document 2  ][ question  ]

    A block that straddles two belongs to the later one. Two documents have the same tokens if they have the same id
    and length; two questions if they have the same ``number``, and two answers if their prompts are the same. Without
    a ``number`` only the blocks before the question have keys.
    """
    digest, end = b"", 0
    runs: list[tuple[int, bytes]] = []
    ends: list[int] = []
    if system_tokens:
        digest, end = _chain(digest, "system", system_tokens), system_tokens
        runs.append((end, digest))
    for doc_id, num_tokens in zip(request.doc_ids, request.doc_tokens, strict=True):
        digest = _chain(digest, "document", num_tokens, doc_id)
        end += num_tokens
        runs.append((end, digest))
        ends.append(end)
    num_prompt_tokens = num_tokens = end + request.question_tokens
    if number is not None:
        if request.question_tokens:
            digest = _chain(digest, "question", number)
            runs.append((num_prompt_tokens, digest))
        num_tokens += request.output_tokens - 1
        runs.append((num_tokens, _chain(digest, "answer")))
    keys = _keys(runs, block_size)
    path, documents = _path(
        keys[: num_prompt_tokens // block_size],
        request.doc_ids,
        ends,
        system_tokens=system_tokens,
        block_size=block_size,
        max_cached_documents=max_cached_documents,
    )
    return PromptBlocks(keys, num_prompt_tokens, num_tokens, path, documents)


def _chain(digest: bytes, kind: str, number: int = 0, doc_id: str = "") -> bytes:
    """Return what names a run of tokens after everything before it."""
    name = f"{kind} {number} {doc_id}".encode("utf-8", "surrogatepass")  # half a pair is an id as any other
    return blake2b(digest + name, digest_size=_DIGEST_BYTES).digest()


def _keys(runs: Sequence[tuple[int, bytes]], block_size: int) -> list[int]:
    """Return a key for each full block: of the run that its last token lies in, and of its place."""
    keys: list[int] = []
    for end, digest in runs:
        base = int.from_bytes(digest) << _POSITION_BITS
        keys += range(base + len(keys), base + end // block_size)
    return keys


def _path(
    keys: Sequence[int],
    doc_ids: Sequence[str],
    ends: Sequence[int],
    *,
    system_tokens: int,
    block_size: int,
    max_cached_documents: int | None,
) -> tuple[list[PathSegment], list[DocumentUnits]]:
    path: list[PathSegment] = []
    documents: list[DocumentUnits] = []
    first = 0

    def add(last: int, doc_id: str | None, num_documents: int) -> None:
        nonlocal first
        if last > first:
            is_transient = max_cached_documents is not None and num_documents > max_cached_documents
            path.append(PathSegment(keys[first:last], (last - first) * block_size, doc_id, is_transient))
            first = last

    if doc_ids:  # else all of it is one run without a name
        add(system_tokens // block_size, None, 0)
    for i, (doc_id, end) in enumerate(zip(doc_ids, ends, strict=True), 1):
        documents.append(DocumentUnits(first, end // block_size))
        add(end // block_size, doc_id, i)
    add(len(keys), None, len(doc_ids))
    return path, documents
