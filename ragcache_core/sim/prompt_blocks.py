"""A request's prompt as blocks of tokens, each with a key that depends on all earlier tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from ragcache_core.sim.traces.trace import TracedRequest
from ragcache_core.tree import PathSegment

_DIGEST_BYTES = 12
_POSITION_BITS = 32


@dataclass(frozen=True, slots=True)
class DocumentUnits:
    """The blocks ``[first, last)`` of a document, and the number that must be cached for a hit."""

    first: int
    last: int

    @property
    def num_needed(self) -> int:
        """Number of prompt blocks that must be cached; a document within a block needs that block."""
        return max(self.last, self.first + 1)


class History(NamedTuple):
    """The history of a conversation, including the system prompt.

    ``runs`` are ends and identities of its token runs; ``documents`` are ids, first and last tokens of its documents.
    """

    runs: tuple[tuple[int, bytes], ...] = ()
    documents: tuple[tuple[str, int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        """Number of its tokens."""
        return self.runs[-1][0] if self.runs else 0


@dataclass(frozen=True, slots=True)
class PromptBlocks:
    """The full blocks of a prompt and its answer.

    Attributes:
        keys: of the prompt's blocks, then of the answer's as far as its KV is computed: all but its last token's.
        num_prompt_tokens, num_tokens: of the prompt; of both.
        path: what they are in the tree.
        documents: where each document lies.
        num_document_blocks: those before the first document that is not kept, of this turn or of an earlier one, or
            before the question; None where there is no document.
        history: the prompt and its answer, for a conversation's next turn.
        answer_key: of the block in which the answer begins; None where it does not fill that with its last token.
    """

    keys: Sequence[int]
    num_prompt_tokens: int
    num_tokens: int
    path: Sequence[PathSegment]
    documents: Sequence[DocumentUnits]
    num_document_blocks: int | None
    history: History
    answer_key: int | None


def cut_into_blocks(
    request: TracedRequest,
    number: int | None,
    *,
    system_tokens: int,
    block_size: int,
    max_cached_documents: int | None = None,
    history: History = History(),  # noqa: B008 (immutable)
) -> PromptBlocks:
    """Return the blocks of a request: system prompt, documents, question, answer.

    Those of a conversation's next turn follow its ``history``.

    ::

        tokens    system | document 1     | document 2  | question    | answer
        blocks    [ 0 ][ 1 ][ 2 ][ 3 ][ 4 ][ 5 ][ 6 ][ 7 ][ 8 ][ 9 ][ 10 ]
        path      [system][ document 1   ][document 2  ][ question  ]

    A block that straddles two belongs to the later one. Two documents have the same tokens if they have the same id
    and length; two questions if they have the same ``number``, and two answers if their prompts are the same. Without
    a ``number`` only the blocks before the question have keys.
    """
    runs = list(history.runs)
    end, digest = runs[-1] if runs else (0, b"")
    documents = list(history.documents)
    if system_tokens and not runs:
        digest, end = _chain(digest, "system", system_tokens), system_tokens
        runs.append((end, digest))
    for doc_id, num_tokens in zip(request.doc_ids, request.doc_tokens, strict=True):
        digest = _chain(digest, "document", num_tokens, doc_id)
        documents.append((doc_id, end, end + num_tokens))
        end += num_tokens
        runs.append((end, digest))
    num_prompt_tokens = num_tokens = end + request.question_tokens
    if number is not None:
        if request.question_tokens:
            digest = _chain(digest, "question", number)
            runs.append((num_prompt_tokens, digest))
        num_tokens += request.output_tokens - 1
        runs.append((num_tokens, _chain(digest, "answer")))
    keys = _keys(runs, block_size)
    first = num_prompt_tokens // block_size
    has_answer = number is not None and (num_tokens + 1) // block_size > first
    path, units = _path(
        keys[: num_prompt_tokens // block_size],
        documents,
        block_size=block_size,
        max_cached_documents=max_cached_documents,
    )
    num_kept = len(documents) if max_cached_documents is None else min(max_cached_documents, len(documents))
    ends = [*(first for _, first, _ in documents[1:]), documents[-1][2]] if documents else []
    answered = (*runs[:-1], (num_tokens + 1, runs[-1][1])) if number is not None else ()
    return PromptBlocks(
        keys, num_prompt_tokens, num_tokens, path, units[len(history.documents) :],
        ends[num_kept - 1] // block_size if num_kept else None, History(answered, tuple(documents)),
        _key(runs[-1][1], first) if has_answer else None,
    )  # fmt: skip


def _chain(digest: bytes, kind: str, number: int = 0, doc_id: str = "") -> bytes:
    """Return the identity of a run of tokens after all earlier ones."""
    name = f"{kind} {number} {doc_id}".encode("utf-8", "surrogatepass")  # half a pair is an id as any other
    return blake2b(digest + name, digest_size=_DIGEST_BYTES).digest()


def _keys(runs: Sequence[tuple[int, bytes]], block_size: int) -> list[int]:
    """Return a key per full block: of the run of its last token, and of its position."""
    keys: list[int] = []
    for end, digest in runs:
        keys += range(_key(digest, len(keys)), _key(digest, end // block_size))
    return keys


def _key(digest: bytes, place: int) -> int:
    return (int.from_bytes(digest) << _POSITION_BITS) + place


def _path(
    keys: Sequence[int],
    shown: Sequence[tuple[str, int, int]],
    *,
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

    if shown:  # else all of it is one run without a name
        add(shown[0][1] // block_size, None, 0)
    for i, (doc_id, _, end) in enumerate(shown, 1):
        documents.append(DocumentUnits(first, end // block_size))
        # question and answer of an earlier turn belong to the document before them
        add((end if i == len(shown) else shown[i][1]) // block_size, doc_id, i)
    add(len(keys), None, len(shown))
    return path, documents
