"""Selection of the tokens of reused chunks to recompute, given their number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from ragcache_core.chunk.types import ChunkVariant
from ragcache_core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SelectableChunk:
    """A reused chunk, with ``budget``, its number of tokens to recompute."""

    variant: ChunkVariant
    budget: int


class TokenSelection(Protocol):
    """Selects tokens to recompute among all reused chunks of a request.

    It sees them together, so a budget may move from chunk to chunk; their sum is never exceeded. Deterministic: the
    same chunks get the same tokens, in every process.
    """

    name: ClassVar[str]
    is_all_or_nothing: ClassVar[bool]
    """Whether a chunk's budget is all of its tokens or none: ``recompute.py`` weighs chunks otherwise then."""

    def select(self, chunks: Sequence[SelectableChunk]) -> list[tuple[int, ...]]:
        """Return the offsets to recompute within each of ``chunks``, sorted; parallel to them."""
        ...


class CacheCraftSelection:
    """The tokens that attended most to other chunks at their capture (Cache-Craft §3.2.1, Eq. 14)."""

    name: ClassVar[str] = "cache_craft"
    is_all_or_nothing: ClassVar[bool] = False

    def select(self, chunks: Sequence[SelectableChunk]) -> list[tuple[int, ...]]:
        return [_highest(chunk.variant.statistics.token_inter, chunk.budget) for chunk in chunks]


class WholeChunksSelection:
    """All tokens of chunks that depend on lost neighbours, none of others (not from the paper).

    Where a chunk says only "It", every later token of it has taken in what "It" was, and a few recomputed ones mend
    nothing; a chunk that names what it is about needs none. So the budget goes to few chunks wholly.
    """

    name: ClassVar[str] = "whole_chunks"
    is_all_or_nothing: ClassVar[bool] = True

    def select(self, chunks: Sequence[SelectableChunk]) -> list[tuple[int, ...]]:
        return [tuple(range(chunk.budget)) for chunk in chunks]


def _highest(scores: Sequence[float], count: int) -> tuple[int, ...]:
    """Return the indices of the ``count`` highest scores, sorted; the first of equal ones."""
    ranked = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)
    return tuple(sorted(ranked[:count]))


SELECTIONS: dict[str, Callable[[], TokenSelection]] = {
    "cache_craft": CacheCraftSelection,
    "whole_chunks": WholeChunksSelection,
}
"""Every selection by the name that configurations use."""


def make_selection(name: str) -> TokenSelection:
    """Return the selection with this name.

    Raises:
        ConfigError: there is none; the message lists those that there are.
    """
    if name not in SELECTIONS:
        raise ConfigError(f"selection is {name!r}; choose one of {', '.join(SELECTIONS)}")
    return SELECTIONS[name]()
