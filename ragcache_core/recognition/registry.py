"""The registered documents of one tenant, and their candidates in prompts.

A document is its tokens, as they are alone. In a prompt its first and last tokens may be others, because tokenizers
merge them with the text around. The rest, its interior, is in every prompt that shows the document::

    prompt    [..., 17,  5, 88, 41,  7, 12, 93, 64, 20, 31, 75,  8, ...]
    document            [89, 41,  7, 12, 93, 64, 20, 31, 75, 9]
    interior                [41,  7, 12, 93, 64, 20, 31, 75]      in both
    anchor                      [7, 12, 93, 64]                   a window that few other documents have as theirs

The hash of each window of a prompt is looked up in a table of anchors. Each candidate is verified by the 64-bit hash of
its interior. Of a document 64 to 150 bytes in arrays are kept for each form.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragcache_core.recognition.hashing import PolynomialHash, Sums, Tokens, as_tokens
from ragcache_core.recognition.registration import EDGE_WIDTH, DocumentForm, Registration
from ragcache_core.types import DocId

_FEWEST_SLOTS = 1 << 10
_MULTIPLIER = 2654435769  # Knuth's multiplicative hash: 2**32 / golden ratio
_REMOVED = 1
_FIRST_RECORD = 2


class AnchorTable:
    """Maps keys to the first record of a chain.

    A filter of four flags a slot rejects most keys that are not in the table. A slot holds ``record + 2``, 1 where the
    key has no record any more, and 0 where it is free.
    """

    def __init__(self) -> None:
        self._num_used = 0
        self._allocate(_FEWEST_SLOTS)

    def __bool__(self) -> bool:
        return self._num_used > 0

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return self._keys.nbytes + self._heads.nbytes + self._filter.nbytes

    def look_up(self, keys: NDArray[np.uint32]) -> NDArray[np.int32]:
        """Return the record of each key; -1 if there is none."""
        heads = np.full(len(keys), -1, np.int32)
        left = np.flatnonzero(self._filter[keys >> np.uint32(30 - self._bits)])
        wanted, mask = keys[left], len(self._keys) - 1
        slots = self._slots_of(wanted)
        while left.size:
            found = self._heads[slots]
            is_same = self._keys[slots] == wanted
            heads[left[is_same]] = found[is_same] - _FIRST_RECORD
            goes_on = np.flatnonzero((found > 0) & ~is_same)
            left, wanted, slots = left[goes_on], wanted[goes_on], (slots[goes_on] + 1) & mask
        np.maximum(heads, -1, out=heads)
        return heads

    def put(self, key: int, record: int) -> int:
        """Set the record of a key; return the previous one, or -1."""
        if 2 * self._num_used >= len(self._keys):
            self._rebuild()
        slot = self._slot_of(key)
        before = int(self._heads[slot])
        self._num_used += before == 0
        self._keys[slot], self._heads[slot] = key, record + _FIRST_RECORD
        self._filter[key >> (30 - self._bits)] = True
        return max(before - _FIRST_RECORD, -1)

    def get(self, key: int) -> int:
        """Return the record of a key, or -1."""
        return max(int(self._heads[self._slot_of(key)]) - _FIRST_RECORD, -1)

    def replace(self, key: int, record: int) -> None:
        """Set the record of a stored key; -1 removes it."""
        self._heads[self._slot_of(key)] = max(record + _FIRST_RECORD, _REMOVED)

    def _allocate(self, num_slots: int) -> None:
        self._keys, self._heads = np.zeros(num_slots, np.uint32), np.zeros(num_slots, np.int32)
        self._filter = np.zeros(4 * num_slots, bool)
        self._bits = num_slots.bit_length() - 1

    def _slots_of(self, keys: NDArray[np.uint32]) -> NDArray[np.int64]:
        return ((keys * np.uint32(_MULTIPLIER)) >> np.uint32(32 - self._bits)).astype(np.int64)

    def _slot_of(self, key: int) -> int:
        slot, mask = ((key * _MULTIPLIER) & 0xFFFFFFFF) >> (32 - self._bits), len(self._keys) - 1
        while self._heads[slot] and self._keys[slot] != key:
            slot = (slot + 1) & mask
        return slot

    def _rebuild(self) -> None:
        """Move all records to a table that is at most half full."""
        kept = np.flatnonzero(self._heads >= _FIRST_RECORD)
        keys, heads = self._keys[kept], self._heads[kept]
        self._allocate(max(_FEWEST_SLOTS, 1 << (2 * len(keys)).bit_length()))
        self._num_used = len(keys)
        self._filter[keys >> np.uint32(30 - self._bits)] = True
        slots, mask = self._slots_of(keys), len(self._keys) - 1
        left = np.arange(len(keys))
        while left.size:  # all keys at once: each free slot takes the first of its keys
            free = left[self._heads[slots[left]] == 0]
            _, first = np.unique(slots[free], return_index=True)
            placed = free[first]
            self._keys[slots[placed]], self._heads[slots[placed]] = keys[placed], heads[placed]
            left = np.setdiff1d(left, placed, assume_unique=True)
            slots[left] = (slots[left] + 1) & mask


MIN_TOKENS = 6
"""Tokens of the shortest document that is recognised. Shorter texts are in prompts by chance."""
MAX_SAME_CONTENT = 64
"""Documents with the same interior, which differ in their first and last words alone. More are not registered."""
_MAX_CHAIN = 64
_MAX_PLACES = 1 << 16
_MAX_CANDIDATES = 1 << 13
"""Of a prompt: repeated tokens, as of a ruled line, are at each of their tokens a document that repeats them."""
_LOW_BITS = 0xFFFFFFFF
_ANCHOR_SIZES = (8, 4)
_FIRST_RECORDS = 256
_COLUMNS = {
    "content": np.uint64,
    "length": np.int32,
    "anchor_at": np.int32,
    "anchor_key": np.uint32,
    "anchor_size": np.int8,
    "next": np.int32,
    "same_content": np.int32,
    "is_head_cut": bool,
    "is_tail_cut": bool,
}


@dataclass(frozen=True, slots=True)
class Candidate:
    """A document's interior at ``[first, last)`` of a prompt, and its span ``[start, end)`` with its edges.

    ``num_edge`` is how much of its edges the prompt has: bytes where the bytes of tokens are known, tokens otherwise.
    """

    start: int
    end: int
    first: int
    last: int
    num_edge: int
    doc_ids: tuple[DocId, ...]
    acls: frozenset[tuple[str, ...]]


class Registry:
    """Registered documents. Not thread-safe.

    Args:
        hashing: hashes ranges of tokens; the registrations were made with it.
        token_bytes: the bytes of each token id, by which spans end where the text does even if edge tokens are merged.
            Without them merged tokens are not part of a document.
    """

    def __init__(self, hashing: PolynomialHash, token_bytes: Sequence[bytes] | None = None) -> None:
        self._hashing = hashing
        self._token_bytes = token_bytes
        self._tables = {size: AnchorTable() for size in _ANCHOR_SIZES}
        self._contents = AnchorTable()
        self._documents: dict[DocId, tuple[bytes, tuple[int, ...]]] = {}
        self._acls: dict[DocId, tuple[str, ...]] = {}
        self._ids: list[tuple[DocId, ...]] = []
        self._free: list[int] = []
        self._columns: dict[str, NDArray[Any]] = {name: np.zeros(0, kind) for name, kind in _COLUMNS.items()}
        self._edges: NDArray[np.int32] = np.zeros((0, 2 * EDGE_WIDTH), np.int32)

    def __len__(self) -> int:
        return len(self._documents)

    def __contains__(self, doc_id: object) -> bool:
        return doc_id in self._documents

    @property
    def acls(self) -> Mapping[DocId, tuple[str, ...]]:
        """The access groups of documents that have some."""
        return self._acls

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays, without ids and Python's dictionaries."""
        arrays = sum(column.nbytes for column in self._columns.values()) + self._edges.nbytes
        return arrays + sum(table.nbytes for table in (*self._tables.values(), self._contents))

    def is_registered(self, doc_id: DocId, digest: bytes, acl: tuple[str, ...] | None) -> bool:
        """Return whether this text is registered with this id and access groups."""
        known = self._documents.get(doc_id)
        return known is not None and known[0] == digest and self._acls.get(doc_id) == acl

    # Registration

    def make_form(
        self, token_ids: Sequence[int] | Tokens, edges: tuple[int, int], taken: Collection[int] = frozenset()
    ) -> DocumentForm | None:
        """Return a form for :meth:`add`; ``None`` if the text has too few tokens.

        Args:
            token_ids: the tokens of the text alone.
            edges: how many of its first and last tokens may be others in a prompt.
            taken: keys of anchors that forms have which are not added yet.
        """
        tokens = as_tokens(token_ids)
        num_first, num_last = edges
        length = len(tokens) - num_first - num_last
        size = next((size for size in _ANCHOR_SIZES if length >= size), 0)
        if len(tokens) < MIN_TOKENS or not size:
            return None
        sums = self._hashing.prefix_sums(tokens[num_first : num_first + length])
        keys = self._hashing.window_keys(sums, size)
        at = self._rarest(self._tables[size], keys, taken)
        head, tail = tokens[:num_first][::-1], tokens[num_first + length :]
        return DocumentForm(
            content=self._hashing.range_hash(sums, 0, length),
            length=length,
            anchor_key=int(keys[at]),
            anchor_at=at,
            anchor_size=size,
            head=tuple(head[:EDGE_WIDTH].tolist()),
            tail=tuple(tail[:EDGE_WIDTH].tolist()),
            is_head_cut=num_first > EDGE_WIDTH,
            is_tail_cut=num_last > EDGE_WIDTH,
        )

    def add(self, registration: Registration) -> bool:
        """Register a document, replacing a former text with the same id.

        Returns:
            Whether it can be recognised: False where 64 others have the same interior, or the same windows in it.
        """
        doc_id = registration.doc_id
        self.forget(doc_id)
        own = (doc_id,)  # one object for all forms
        records = tuple(dict.fromkeys(r for form in registration.forms if (r := self._add_form(own, form)) is not None))
        if records:
            self._documents[doc_id] = registration.digest, records
            if registration.acl is not None:
                self._acls[doc_id] = registration.acl
        return bool(records)

    def forget(self, doc_id: DocId) -> bool:
        """Remove a document; return whether it was registered."""
        self._acls.pop(doc_id, None)
        known = self._documents.pop(doc_id, None)
        for record in () if known is None else known[1]:
            self._ids[record] = tuple(other for other in self._ids[record] if other != doc_id)
            if not self._ids[record]:
                self._drop(record)
        return known is not None

    def _add_form(self, own: tuple[DocId], form: DocumentForm) -> int | None:
        edges = _edge_row(form)
        num_same = 0
        key = form.content & _LOW_BITS
        for record in self._chain("same_content", self._contents.get(key)):
            if self._columns["content"][record] != form.content:
                continue
            num_same += 1
            if np.array_equal(self._edges[record], edges):
                if own[0] not in self._ids[record]:
                    self._ids[record] += own
                return record
        num_same_anchor = self._chain_len(self._tables[form.anchor_size].get(form.anchor_key))
        if num_same >= MAX_SAME_CONTENT or num_same_anchor >= _MAX_CHAIN:
            return None
        record = self._new_record()
        for name in ("content", "length", "anchor_at", "anchor_key", "anchor_size", "is_head_cut", "is_tail_cut"):
            self._columns[name][record] = getattr(form, name)
        self._edges[record] = edges
        self._columns["next"][record] = self._tables[form.anchor_size].put(form.anchor_key, record)
        self._columns["same_content"][record] = self._contents.put(key, record)
        self._ids[record] = own
        return record

    def _drop(self, record: int) -> None:
        table = self._tables[int(self._columns["anchor_size"][record])]
        key = int(self._columns["anchor_key"][record])
        if (head := self._without("next", table.get(key), record)) is not None:
            table.replace(key, head)
        key = int(self._columns["content"][record]) & _LOW_BITS
        if (head := self._without("same_content", self._contents.get(key), record)) is not None:
            self._contents.replace(key, head)
        self._free.append(record)

    def _chain(self, links: str, record: int) -> Iterator[int]:
        while record >= 0:
            yield record
            record = int(self._columns[links][record])

    def _without(self, links: str, head: int, record: int) -> int | None:
        """Remove a record from a chain; return the new first record if the first changed."""
        after = int(self._columns[links][record])
        if head == record:
            return after
        before = next(each for each in self._chain(links, head) if self._columns[links][each] == record)
        self._columns[links][before] = after
        return None

    def _rarest(self, table: AnchorTable, keys: NDArray[np.uint32], taken: Collection[int]) -> int:
        """Return the earliest window that is no anchor, or that of the fewest documents."""
        heads = table.look_up(keys)
        free = np.flatnonzero(heads < 0).tolist()
        at = next((at for at in free if int(keys[at]) not in taken), None) if taken else next(iter(free), None)
        if at is not None:
            return int(at)
        step = max(1, len(keys) // 64)
        return min(range(0, len(keys), step), key=lambda at: self._chain_len(int(heads[at])))

    def _chain_len(self, head: int) -> int:
        return sum(1 for _, _ in zip(self._chain("next", head), range(_MAX_CHAIN), strict=False))

    def _new_record(self) -> int:
        if self._free:
            return self._free.pop()
        record = len(self._ids)
        if record == len(self._edges):
            num_more = max(_FIRST_RECORDS, record // 2)
            for name, column in self._columns.items():
                self._columns[name] = np.concatenate([column, np.zeros(num_more, column.dtype)])
            self._edges = np.concatenate([self._edges, np.zeros((num_more, 2 * EDGE_WIDTH), np.int32)])
        self._ids.append(())
        return record

    # Recognition

    def candidates(self, tokens: Tokens, sums: Sums) -> list[Candidate] | None:
        """Return the documents that a prompt contains completely; they may overlap. ``None`` if there are too many."""
        verified = self._verified(sums, len(tokens))
        if verified is None or len(verified[0]) > _MAX_CANDIDATES:
            return None
        records, starts = verified
        found = {(int(first), int(record)) for first, record in zip(starts, records, strict=True)}
        return [each for first, record in found if (each := self._candidate(tokens, record, first)) is not None]

    def _verified(self, sums: Sums, num_tokens: int) -> tuple[NDArray[np.int32], NDArray[np.int64]] | None:
        """Return records whose interior is in a prompt with their positions; ``None`` if there are too many."""
        columns, all_records, all_starts, num_remaining = self._columns, [], [], _MAX_PLACES
        for size, table in self._tables.items():
            if not table:
                continue
            heads = table.look_up(self._hashing.window_keys(sums, size))
            places = np.flatnonzero(heads >= 0)
            records = heads[places]
            while len(records):
                if (num_remaining := num_remaining - len(records)) < 0:
                    return None
                all_records.append(records)
                all_starts.append(places - columns["anchor_at"][records])
                records = columns["next"][records]
                places, records = places[records >= 0], records[records >= 0]
        if not all_records:
            return np.zeros(0, np.int32), np.zeros(0, np.int64)
        records, starts = np.concatenate(all_records), np.concatenate(all_starts)
        ends = starts + columns["length"][records]
        fits = (starts >= 0) & (ends <= num_tokens)
        records, starts, ends = records[fits], starts[fits], ends[fits]
        is_whole = self._hashing.range_hashes(sums, starts, ends) == columns["content"][records]
        return records[is_whole], starts[is_whole]

    def _candidate(self, tokens: Tokens, record: int, first: int) -> Candidate | None:
        """Return a verified interior with its edges; ``None`` if they do not match."""
        last = first + int(self._columns["length"][record])
        head = self._edge(tokens, record, first, is_tail=False)
        tail = self._edge(tokens, record, last, is_tail=True)
        if head is None or tail is None:
            return None
        doc_ids = self._ids[record]
        acls = frozenset(acl for doc_id in doc_ids if (acl := self._acls.get(doc_id)) is not None)
        return Candidate(min(head[0], first), max(tail[0], last), first, last, head[1] + tail[1], doc_ids, acls)

    def _edge(self, tokens: Tokens, record: int, at: int, *, is_tail: bool) -> tuple[int, int] | None:
        """Return a document's start or end from its interior's, and how much of its edge matches."""
        row = self._edges[record]
        edge = [token for token in (row[EDGE_WIDTH:] if is_tail else row[:EDGE_WIDTH]).tolist() if token >= 0]
        is_cut = bool(self._columns["is_tail_cut" if is_tail else "is_head_cut"][record])
        if self._token_bytes is not None and not is_cut:
            return self._edge_by_text(tokens, edge, at, is_tail=is_tail)
        step, i = (1, at) if is_tail else (-1, at - 1)
        for token in edge:
            if not 0 <= i < len(tokens) or tokens[i] != token:
                break
            i += step
        return (i if is_tail else i + 1), abs(i - at) if is_tail else at - 1 - i

    def _edge_by_text(self, tokens: Tokens, edge: Sequence[int], at: int, *, is_tail: bool) -> tuple[int, int] | None:
        """Return the end of an edge whose bytes are in the prompt, with the same tokens or others.

        A token with more than the edge's text belongs to the text around at the end, and to the document at the
        beginning, as in ``prompt.segment_tokens``.
        """
        known = self._token_bytes
        assert known is not None
        if any(token >= len(known) for token in edge):
            return None
        text = b"".join(known[token] for token in (edge if is_tail else edge[::-1]))
        if not is_tail:
            text = text.lstrip(b" ")  # some tokenizers put a space before every text
        size = len(text)
        while text:
            i = at if is_tail else at - 1
            shown = known[int(tokens[i])] if 0 <= i < len(tokens) and 0 <= tokens[i] < len(known) else b""
            if not shown:
                return None
            if not (text.startswith(shown) if is_tail else text.endswith(shown)):
                is_merged = shown.startswith(text) if is_tail else shown.endswith(text)
                return ((at if is_tail else i), size) if is_merged else None
            text = text[len(shown) :] if is_tail else text[: -len(shown)]
            at += 1 if is_tail else -1
        return at, size


def _edge_row(form: DocumentForm) -> NDArray[np.int32]:
    row = np.full(2 * EDGE_WIDTH, -1, np.int32)
    row[: len(form.head)], row[EDGE_WIDTH : EDGE_WIDTH + len(form.tail)] = form.head, form.tail
    return row
