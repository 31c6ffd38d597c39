"""The documents that a filter selects, by fields of their metadata that are kept in memory.

A filter is asked once for each different value of a field, not for each document. Segments are immutable, so a field is
read from its JSON once, when a filter first names it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragcache_core.retrieval.extra import faiss
from ragcache_core.retrieval.filters import AllOf, AnyOf, FieldCondition, Not, Where, kind_of

Mask = NDArray[np.bool_]
Ids = NDArray[np.int64]

_SCALARS = (bool, int, float)


@dataclass(frozen=True, eq=False)
class Column:
    """A field of a segment's documents, by ascending internal id: ``values[codes[i]]``; the first is ``None``."""

    values: list[object]
    codes: NDArray[np.int32]
    kinds: Mapping[str, object]
    """The kinds of its values, but for ``None``, each with an example."""

    def holding(self, accepts: Callable[[object], bool]) -> Mask:
        """Return which documents have a value that is accepted: ``[n]``."""
        return np.array([accepts(value) for value in self.values], np.bool_)[self.codes]


def read_columns(metadata: Iterable[str], fields: Iterable[str]) -> dict[str, Column]:
    """Return the columns of ``fields`` from each document's metadata, which is JSON."""
    codes: dict[str, list[int]] = {field: [] for field in fields}
    numbers: dict[str, dict[object, int]] = {field: {None: 0} for field in codes}
    values: dict[str, list[object]] = {field: [None] for field in codes}
    for text in metadata:
        found = json.loads(text)
        for field, column in codes.items():
            value = found.get(field)
            key: object
            if value is None or type(value) is str:
                key = value
            else:  # 1, 1.0 and True are one key of a dict
                key = type(value), value if type(value) in _SCALARS else json.dumps(value)
            number = numbers[field].setdefault(key, len(values[field]))
            if number == len(values[field]):
                values[field].append(value)
            column.append(number)
    return {
        field: Column(values[field], np.array(column, np.int32), _kinds(values[field]))
        for field, column in codes.items()
    }


def _kinds(values: Iterable[object]) -> dict[str, object]:
    kinds: dict[str, object] = {}
    for value in values:
        if value is not None:
            kinds.setdefault(kind_of(value), value)
    return kinds


def evaluate(where: Where, columns: Mapping[str, Column], count: int) -> Mask:
    """Return which of a segment's ``count`` documents pass: ``[count]``."""
    match where:
        case FieldCondition():
            return columns[where.field].holding(where.accepts)
        case Not(condition):
            return ~evaluate(condition, columns, count)
        case AllOf(conditions):
            passed: Mask = np.ones(count, np.bool_)
            for condition in conditions:
                passed &= evaluate(condition, columns, count)
            return passed
        case AnyOf(conditions):
            passed = np.zeros(count, np.bool_)
            for condition in conditions:
                passed |= evaluate(condition, columns, count)
            return passed


class Selection:
    """The documents that a search is limited to, by internal id; or the rows of an index. Immutable.

    ``ids`` ascend; ``mask`` says of each number below ``length`` whether it is one of them.
    """

    def __init__(self, ids: Ids, length: int | None = None) -> None:
        self.ids = ids
        self.mask: Mask = np.zeros((int(ids[-1]) + 1 if len(ids) else 0) if length is None else length, np.bool_)
        self.mask[ids] = True
        self._rows: tuple[Ids, Selection] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def has(self, ids: Ids) -> Mask:
        """Return which of some internal ids are selected: ``[len(ids)]``."""
        last = len(self.mask) - 1
        if last < 0:
            return np.zeros(len(ids), np.bool_)
        found: Mask = self.mask[np.minimum(ids, last)] & (ids <= last)
        return found

    def rows_in(self, ids: Ids) -> Selection:
        """Return the selected rows of an index that has these internal ids. Remembered for the last index."""
        known = self._rows
        if known is None or known[0] is not ids:
            known = self._rows = ids, Selection(np.flatnonzero(self.has(ids)), len(ids))
        return known[1]

    @functools.cached_property
    def selector(self) -> Any:
        """Faiss's selector of the ids, for its own searches."""
        return bitmap_selector(self.mask)


def bitmap_selector(mask: Mask) -> Any:
    """Return Faiss's selector of the places that are true. It keeps the bits that it reads."""
    bits = np.packbits(mask, bitorder="little")
    selector = faiss.IDSelectorBitmap(len(bits), faiss.swig_ptr(bits))
    selector.kept_bits = bits  # or they would be freed under it
    return selector
