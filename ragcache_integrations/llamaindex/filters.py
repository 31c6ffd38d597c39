"""LlamaIndex's metadata filters as RAGCache's."""

from __future__ import annotations

from llama_index.core.vector_stores.types import FilterCondition, FilterOperator, MetadataFilter, MetadataFilters

from ragcache_core.errors import ConfigError
from ragcache_core.retrieval.filters import AllOf, AnyOf, FieldCondition, Not, Operator, Where

_OPERATORS: dict[FilterOperator, Operator] = {
    FilterOperator.EQ: "eq",
    FilterOperator.NE: "ne",
    FilterOperator.GT: "gt",
    FilterOperator.GTE: "gte",
    FilterOperator.LT: "lt",
    FilterOperator.LTE: "lte",
    FilterOperator.IN: "in",
    FilterOperator.NIN: "nin",
    FilterOperator.CONTAINS: "contains",
    FilterOperator.ANY: "any",
    FilterOperator.ALL: "all",
    FilterOperator.TEXT_MATCH: "text_match",
    FilterOperator.TEXT_MATCH_INSENSITIVE: "text_match_insensitive",
    FilterOperator.IS_EMPTY: "is_empty",
}


def where_of(filters: MetadataFilters | None) -> Where | None:
    """Return the expression of ``filters``; ``None`` if all nodes pass. Filters may be nested.

    Raises:
        ConfigError: it is no filter, or one whose operator has nothing to do with its value.
    """
    if filters is None:
        return None
    if not isinstance(filters, MetadataFilters):
        raise ConfigError(f"filters is {filters!r:.80}: pass LlamaIndex's MetadataFilters(filters=[...])")
    return _where_of(filters) if filters.filters else None


def _where_of(part: MetadataFilters | MetadataFilter) -> Where:
    if isinstance(part, MetadataFilter):
        if part.operator not in _OPERATORS:
            known = ", ".join(operator.value for operator in _OPERATORS)
            raise ConfigError(f"filter {part.key!r} has the operator {part.operator.value!r}: these are known: {known}")
        return FieldCondition(part.key, _OPERATORS[part.operator], part.value)
    parts = tuple(_where_of(each) for each in part.filters)
    if not parts or part.condition in (FilterCondition.AND, None):
        return AllOf(parts)
    return AnyOf(parts) if part.condition == FilterCondition.OR else Not(AnyOf(parts))
