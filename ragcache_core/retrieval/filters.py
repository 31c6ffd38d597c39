"""Metadata filters: expressions over metadata fields, and the documents that they select.

The common subset of LangChain's and LlamaIndex's filters. A document without a field has the value ``None`` there: only
``ne``, ``nin`` and ``is_empty`` accept it, and ``eq`` if it compares with ``None``.

A filter is evaluated once for each different value of a field, not for each document. Segments are immutable, so a
field is read from their JSON once, when a filter first names it.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ragcache_core.errors import ConfigError
from ragcache_core.retrieval.base import Ids, faiss

Mask = NDArray[np.bool_]

Operator = Literal[
    "eq", "ne", "gt", "gte", "lt", "lte", "in", "nin", "contains", "any", "all", "text_match", "text_match_insensitive",
    "is_empty",
]  # fmt: skip
"""``contains``, ``any`` and ``all`` look into a list, or a text; ``text_match`` into a text."""

_OPERATORS = get_args(Operator)
_COMPARED = {"gt", "gte", "lt", "lte"}
_OF_SEVERAL = {"in", "nin", "any", "all"}
_LOOKED_INTO = {"contains", "any", "all"}
_IN_TEXT = {"text_match", "text_match_insensitive"}
_COMBINED = ("$and", "$or", "$not")
_MAX_DEPTH = 64
_SCALARS = (bool, int, float)
_MONGO = {**{f"${name}": name for name in _OPERATORS}, "$neq": "ne"}


@dataclass(frozen=True, slots=True)
class FieldCondition:
    """A condition on one metadata field. Lists are stored as tuples.

    Raises:
        ConfigError: there is no such operator, or it has nothing to do with such a value.
    """

    field: str
    operator: Operator
    value: Any = None

    def __post_init__(self) -> None:
        if not isinstance(self.field, str) or not self.field:
            raise ConfigError(f"a filter's field is {self.field!r:.80}: name a field of the metadata")
        if self.operator not in _OPERATORS:
            raise ConfigError(f"filter has the operator {self.operator!r}: choose one of {', '.join(_OPERATORS)}")
        if isinstance(self.value, list | tuple | set | frozenset):
            object.__setattr__(self, "value", tuple(self.value))
        values = self.value if isinstance(self.value, tuple) else (self.value,)
        if self.operator in _OF_SEVERAL and not isinstance(self.value, tuple):
            raise self._refused("give a list of values")
        for value in values:
            if kind_of(value) == "object" or (isinstance(value, float) and not math.isfinite(value)):
                raise self._refused("give texts, finite numbers, true or false")
        if self.operator in _COMPARED and kind_of(self.value) not in ("number", "text"):
            raise self._refused("compare with a number or a text")
        if self.operator == "contains" and isinstance(self.value, tuple):
            raise self._refused("give one value, or use any or all")
        if self.operator in _IN_TEXT and not isinstance(self.value, str):
            raise self._refused("give a text")

    def accepts(self, value: object) -> bool:
        """Return whether a document with this value passes; ``None`` if the document lacks the field."""
        wanted: Any = self.value
        match self.operator:
            case "eq":
                return _equals(value, wanted)
            case "ne":
                return not _equals(value, wanted)
            case "in":
                return any(_equals(value, one) for one in wanted)
            case "nin":
                return not any(_equals(value, one) for one in wanted)
            case "is_empty":
                return value is None or value in ("", [])
            case "contains":
                return _holds(value, wanted)
            case "any":
                return any(_holds(value, one) for one in wanted)
            case "all":
                return isinstance(value, list | str) and all(_holds(value, one) for one in wanted)
            case "text_match":
                return isinstance(value, str) and wanted in value
            case "text_match_insensitive":
                return isinstance(value, str) and wanted.casefold() in value.casefold()
        if kind_of(value) != kind_of(wanted):
            return False
        compared: Any = value
        match self.operator:
            case "gt":
                return bool(compared > wanted)
            case "gte":
                return bool(compared >= wanted)
            case "lt":
                return bool(compared < wanted)
        return bool(compared <= wanted)

    def misfit(self, kinds: Mapping[str, object]) -> str | None:
        """Return why no value of these kinds (each with an example) can pass; ``None`` if one can.

        ``None`` where one could, or where nothing is wrong with asking for a field that no document has.
        """
        wanted = self.value if self.operator in ("in", "nin") else (self.value,)
        if self.operator == "is_empty" or not wanted or None in wanted:
            return None
        if not kinds:
            return "no document has this field"
        if self.operator in _LOOKED_INTO:
            fitting = {"list", "text"}
        elif self.operator in _IN_TEXT:
            fitting = {"text"}
        else:
            fitting = {kind_of(value) for value in wanted}
        if fitting.isdisjoint(kinds):
            held = ", ".join(f"{kind} (as {example!r:.40})" for kind, example in kinds.items())
            return f"it wants {' or '.join(sorted(fitting))}, this field holds {held}"
        return None

    def __str__(self) -> str:
        shown = list(self.value) if isinstance(self.value, tuple) else self.value
        return f"{self.field!r} {self.operator} {shown!r:.80}"

    def _refused(self, cure: str) -> ConfigError:
        return ConfigError(f"filter {self}: {cure}")


@dataclass(frozen=True, slots=True)
class AllOf:
    """All conditions must hold; true if there are none."""

    conditions: tuple[Where, ...]


@dataclass(frozen=True, slots=True)
class AnyOf:
    """At least one condition must hold."""

    conditions: tuple[Where, ...]


@dataclass(frozen=True, slots=True)
class Not:
    """The condition must not hold."""

    condition: Where


Where = FieldCondition | AllOf | AnyOf | Not
"""A filter as an expression. Hashable."""


def parse_filter(given: Mapping[str, Any], *, depth: int = 0) -> Where:
    """Return the expression of a filter in the syntax of LangChain's vector stores.

    ``{"town": "Aro", "year": {"$gte": 2020, "$lt": 2024}}``, with values or ``$eq $ne $gt $gte $lt $lte $in $nin
    $contains $any $all $text_match $text_match_insensitive $is_empty``, a list for ``$in``, and ``{"$and": [...]}``,
    ``{"$or": [...]}``, ``{"$not": ...}``. Several entries must all be met. ``depth`` is how many filters this one
    stands in.

    Raises:
        ConfigError: it is no filter, with what is wrong.
    """
    if not isinstance(given, Mapping):
        raise ConfigError(f"filter is {given!r:.80}: pass {{'field': value}}, or a function of the metadata")
    _check_depth(depth)
    return _joined([part for name, value in given.items() for part in _parsed(name, value, depth + 1)])


def _parsed(name: object, value: Any, depth: int) -> Iterator[Where]:
    if name in ("$and", "$or"):
        if not isinstance(value, list | tuple) or not value:
            raise ConfigError(f"filter has {name} of {value!r:.80}: give it a list of filters")
        parts = tuple(parse_filter(part, depth=depth) for part in value)
        yield AllOf(parts) if name == "$and" else AnyOf(parts)
    elif name == "$not":
        yield Not(parse_filter(value, depth=depth))
    elif not isinstance(name, str) or name.startswith("$"):
        raise ConfigError(
            f"filter has the operator {name!r}: these join filters: {', '.join(_COMBINED)}; these are for a field, "
            f"{{'field': {{'$gt': 3}}}}: {', '.join(_MONGO)}"
        )
    elif isinstance(value, Mapping):
        yield from _field_parsed(name, value, depth)
    else:
        yield FieldCondition(name, "in" if isinstance(value, list | tuple | set) else "eq", value)


def _field_parsed(field: str, conditions: Mapping[Any, Any], depth: int) -> Iterator[Where]:
    _check_depth(depth)
    if not conditions:
        raise ConfigError(f"filter {field!r} is {{}}: give a value or operators, {', '.join(_MONGO)}")
    for operator, value in conditions.items():
        if operator == "$not" and isinstance(value, Mapping):
            yield Not(_joined(list(_field_parsed(field, value, depth + 1))))
        elif operator in _MONGO:
            yield FieldCondition(field, _MONGO[operator], value)
        else:
            raise ConfigError(
                f"filter {field!r} has the operator {operator!r} with {value!r:.80}: these are known: "
                f"{', '.join(_MONGO)}"
            )


def _check_depth(depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise ConfigError(f"filters are nested more than {_MAX_DEPTH} levels deep: use fewer nested $and and $or")


def _joined(parts: list[Where]) -> Where:
    return parts[0] if len(parts) == 1 else AllOf(tuple(parts))


def conditions_of(where: Where) -> Iterator[FieldCondition]:
    """Yield every condition in an expression."""
    match where:
        case FieldCondition():
            yield where
        case Not(condition):
            yield from conditions_of(condition)
        case AllOf(conditions) | AnyOf(conditions):
            for condition in conditions:
                yield from conditions_of(condition)


def matches(where: Where, metadata: Mapping[str, object]) -> bool:
    """Return whether a document with this metadata passes."""
    match where:
        case FieldCondition():
            return where.accepts(metadata.get(where.field))
        case Not(condition):
            return not matches(condition, metadata)
        case AllOf(conditions):
            return all(matches(condition, metadata) for condition in conditions)
        case AnyOf(conditions):
            return any(matches(condition, metadata) for condition in conditions)


_KINDS: dict[type, str] = {
    bool: "true or false",
    int: "number",
    float: "number",
    str: "text",
    list: "list",
    tuple: "list",
    type(None): "null",
}


def kind_of(value: object) -> str:
    """Return the kind of a JSON value; values of different kinds are neither equal nor ordered."""
    return _KINDS.get(type(value), "object")


def _equals(value: object, wanted: object) -> bool:
    return kind_of(value) == kind_of(wanted) and value == (list(wanted) if isinstance(wanted, tuple) else wanted)


def _holds(value: object, wanted: object) -> bool:
    if isinstance(value, str):
        return isinstance(wanted, str) and wanted in value
    return isinstance(value, list) and any(_equals(one, wanted) for one in value)


@dataclass(frozen=True, eq=False)
class Column:
    """A field of a segment's documents by ascending internal id: ``values[codes[i]]``; the first value is ``None``."""

    values: list[object]
    codes: NDArray[np.int32]
    kinds: Mapping[str, object]
    """The kinds of its values, but for ``None``, each with an example."""

    def holding(self, accepts: Callable[[object], bool]) -> Mask:
        """Return the mask of documents with an accepted value: ``[n]``."""
        return np.array([accepts(value) for value in self.values], np.bool_)[self.codes]


def read_columns(metadata: Iterable[str], fields: Iterable[str]) -> dict[str, Column]:
    """Return the columns of ``fields`` from each document's JSON metadata."""
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
    """Return the mask of a segment's ``count`` documents that pass: ``[count]``."""
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
    """The documents that a search is limited to, by internal id or by index row. Immutable.

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
        """Return the mask of selected ids: ``[len(ids)]``."""
        last = len(self.mask) - 1
        if last < 0:
            return np.zeros(len(ids), np.bool_)
        found: Mask = self.mask[np.minimum(ids, last)] & (ids <= last)
        return found

    def rows_in(self, ids: Ids) -> Selection:
        """Return the selected rows of an index with these internal ids. Cached for the last index."""
        known = self._rows
        if known is None or known[0] is not ids:
            known = self._rows = ids, Selection(np.flatnonzero(self.has(ids)), len(ids))
        return known[1]

    @functools.cached_property
    def selector(self) -> Any:
        """Faiss's selector of the ids."""
        return bitmap_selector(self.mask)


def bitmap_selector(mask: Mask) -> Any:
    """Return Faiss's selector of the true places. It holds the bits that it reads."""
    bits = np.packbits(mask, bitorder="little")
    selector = faiss.IDSelectorBitmap(len(bits), faiss.swig_ptr(bits))
    selector.kept_bits = bits  # or they would be freed under it
    return selector
