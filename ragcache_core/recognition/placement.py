"""The documents of a prompt without overlap, the longest first, and the unknown text between them."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ragcache_core.recognition.hashing import PolynomialHash, Tokens, as_tokens
from ragcache_core.recognition.registry import MIN_TOKENS, Candidate, Registry
from ragcache_core.types import DocId


@dataclass(frozen=True, slots=True)
class FoundDocument:
    """A document at tokens ``[start, end)`` of a prompt. Others with the same text make it ambiguous."""

    doc_id: DocId
    start: int
    end: int
    is_ambiguous: bool = False


@dataclass(frozen=True, slots=True)
class Recognition:
    """The result of recognition in a prompt.

    Attributes:
        documents: in the order of the prompt, without overlap.
        acls: the access groups of all registered documents with some that the prompt shows, also of overlapping ones.
        max_unknown_tokens: the longest run of tokens outside of the documents.
    """

    documents: tuple[FoundDocument, ...]
    acls: frozenset[tuple[str, ...]]
    max_unknown_tokens: int

    @property
    def is_known(self) -> bool:
        """Whether all text of the prompt that may be a document is a registered one."""
        return self.max_unknown_tokens < MIN_TOKENS


def find_documents(
    hashing: PolynomialHash, registries: Sequence[Registry], token_ids: Sequence[int] | Tokens
) -> Recognition:
    """Return the registered documents that a prompt contains completely.

    Args:
        hashing: that of all registries.
        registries: where to look, the first one's documents before the same of others.
        token_ids: the prompt.
    """
    tokens = as_tokens(token_ids)
    sums = hashing.prefix_sums(tokens)
    found: list[tuple[Candidate, int]] = []
    for order, registry in enumerate(registries):
        candidates = registry.candidates(tokens, sums) if len(registry) else []
        if candidates is None:  # it may show any of them
            every_acl = frozenset(acl for each in registries for acl in each.acls.values())
            return Recognition((), every_acl, len(tokens))
        found += [(candidate, order) for candidate in candidates]
    taken = _without_overlap(found)
    documents = _with_ids(taken, found, len(tokens))
    acls = frozenset(acl for candidate, _ in found for acl in candidate.acls)
    return Recognition(documents, acls, _longest_gap(documents, len(tokens)))


def _without_overlap(found: Sequence[tuple[Candidate, int]]) -> list[Candidate]:
    """Return the longest candidates, of equal ones those with more edge tokens, in prompt order."""
    ranked = sorted(found, key=lambda each: (each[0].start - each[0].end, -each[0].num_edge, each[1], each[0].doc_ids))
    taken: list[Candidate] = []
    firsts: list[int] = []
    for candidate, _ in ranked:
        at = bisect_left(firsts, candidate.first)
        if at and taken[at - 1].last > candidate.first:
            continue
        if at < len(taken) and firsts[at] < candidate.last:
            continue
        taken.insert(at, candidate)
        firsts.insert(at, candidate.first)
    return taken


def _with_ids(
    taken: Sequence[Candidate], found: Sequence[tuple[Candidate, int]], num_tokens: int
) -> tuple[FoundDocument, ...]:
    """Return spans without overlap. Repeats of a text with several ids get the next id."""
    ids_at: Counter[tuple[int, int, int]] = Counter()
    for candidate, _ in found:
        ids_at[candidate.start, candidate.end, candidate.num_edge] += len(candidate.doc_ids)
    shown: Counter[tuple[DocId, ...]] = Counter()
    documents: list[FoundDocument] = []
    end_before = 0
    for i, candidate in enumerate(taken):
        limit = taken[i + 1].first if i + 1 < len(taken) else num_tokens
        start, end = max(candidate.start, end_before), max(min(candidate.end, limit), candidate.last)
        number, ids = shown[candidate.doc_ids], candidate.doc_ids
        shown[ids] += 1
        is_ambiguous = ids_at[candidate.start, candidate.end, candidate.num_edge] > 1
        documents.append(FoundDocument(ids[min(number, len(ids) - 1)], start, end, is_ambiguous))
        end_before = end
    return tuple(documents)


def _longest_gap(documents: Sequence[FoundDocument], num_tokens: int) -> int:
    starts = [*(document.start for document in documents), num_tokens]
    ends = [0, *(document.end for document in documents)]
    return max(start - end for start, end in zip(starts, ends, strict=True))
