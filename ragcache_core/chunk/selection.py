"""Selection of the tokens of reused chunks to recompute, given their number."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from ragcache_core.chunk.types import ChunkVariant
from ragcache_core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SelectableChunk:
    """A chunk that a request reuses, as a selection sees it.

    ``budget`` is the number of its tokens to recompute. ``relevance`` has each token's relevance to the question,
    measured or estimated; None if it is unknown (see ``relevance.py``).
    """

    variant: ChunkVariant
    budget: int
    relevance: Sequence[float] | None = None


class TokenSelection(Protocol):
    """Chooses among the tokens of all the chunks that a request reuses.

    It sees them together, so a budget may move from chunk to chunk; their sum is never exceeded. Deterministic: the
    same chunks get the same tokens, in every process.
    """

    name: ClassVar[str]
    needs_relevance: ClassVar[bool]
    """Whether it asks for ``SelectableChunk.relevance``."""
    is_all_or_nothing: ClassVar[bool]
    """Whether a chunk's budget is all of its tokens or none: ``recompute.py`` weighs chunks otherwise then."""

    def select(self, chunks: Sequence[SelectableChunk]) -> list[tuple[int, ...]]:
        """Return the offsets to recompute within each of ``chunks``, sorted; parallel to them."""
        ...


class CacheCraftSelection:
    """The tokens that looked most at other chunks when they were captured (Cache-Craft §3.2.1, Eq. 14)."""

    name: ClassVar[str] = "cache_craft"
    needs_relevance: ClassVar[bool] = False
    is_all_or_nothing: ClassVar[bool] = False

    def select(self, chunks: Sequence[SelectableChunk]) -> list[tuple[int, ...]]:
        return [_highest(chunk.variant.statistics.token_inter, chunk.budget) for chunk in chunks]


class WholeChunksSelection:
    """All tokens of the chunks that depend on neighbours they have lost, none of the others (ours).

    Where a chunk says only "It", every later token of it has taken in what "It" was, and a few recomputed ones mend
    nothing; a chunk that names what it is about needs none. So the budget goes to few chunks wholly.
    """

    name: ClassVar[str] = "whole_chunks"
    needs_relevance: ClassVar[bool] = False
    is_all_or_nothing: ClassVar[bool] = True

    def select(self, chunks: Sequence[SelectableChunk]) -> list[tuple[int, ...]]:
        return [tuple(range(chunk.budget)) for chunk in chunks]


class FirstTokensSelection:
    """Each chunk's first tokens: what draws attention there is an artefact of having been the beginning (EPIC)."""

    name: ClassVar[str] = "first_tokens"
    needs_relevance: ClassVar[bool] = False
    is_all_or_nothing: ClassVar[bool] = False

    def select(self, chunks: Sequence[SelectableChunk]) -> list[tuple[int, ...]]:
        return [tuple(range(chunk.budget)) for chunk in chunks]


class QuestionDrivenSelection:
    """The tokens that the question asks for, over all chunks: one budget, spent where it matters (ProphetKV's idea).

    A chunk that needs no recomputation gets none of it. ProphetKV measures the question's attention to stored keys. A
    caller that has it passes it as ``relevance``; without it, as in a scheduler, ``lexical_relevance`` estimates it
    from the words.

    Raises:
        ValueError: a chunk has no relevance.
    """

    name: ClassVar[str] = "question_driven"
    needs_relevance: ClassVar[bool] = True
    is_all_or_nothing: ClassVar[bool] = False

    def select(self, chunks: Sequence[SelectableChunk]) -> list[tuple[int, ...]]:
        scores: list[float] = []
        owners: list[tuple[int, int]] = []
        for number, chunk in enumerate(chunks):
            if chunk.relevance is None or len(chunk.relevance) != chunk.variant.num_tokens:
                raise ValueError(f"question_driven needs the relevance of each token; chunk {number} lacks it")
            if chunk.budget:
                scores += chunk.relevance
                owners += ((number, offset) for offset in range(chunk.variant.num_tokens))
        chosen: list[list[int]] = [[] for _ in chunks]
        for place in _highest(scores, sum(chunk.budget for chunk in chunks)):
            number, offset = owners[place]
            chosen[number].append(offset)
        return [tuple(offsets) for offsets in chosen]


class MostAttendedSelection:
    """The tokens that the chunk's other tokens had looked at most (Prefill-H2O): what Cache-Craft compares itself with.

    It is measured of chunks that are computed whole by a request with this selection. Of others, and of what a start
    finds on disk, it takes the first tokens: most attention goes there.
    """

    name: ClassVar[str] = "most_attended"
    needs_relevance: ClassVar[bool] = False
    is_all_or_nothing: ClassVar[bool] = False

    def select(self, chunks: Sequence[SelectableChunk]) -> list[tuple[int, ...]]:
        return [self._of_one(chunk) for chunk in chunks]

    @staticmethod
    def _of_one(chunk: SelectableChunk) -> tuple[int, ...]:
        received = chunk.variant.statistics.token_received
        return _highest(received, chunk.budget) if received else tuple(range(chunk.budget))


class RandomSelection:
    """Any tokens: what every other selection must beat. The seed and the chunk's content decide which."""

    name: ClassVar[str] = "random"
    needs_relevance: ClassVar[bool] = False
    is_all_or_nothing: ClassVar[bool] = False

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def select(self, chunks: Sequence[SelectableChunk]) -> list[tuple[int, ...]]:
        return [self._of_one(chunk) for chunk in chunks]

    def _of_one(self, chunk: SelectableChunk) -> tuple[int, ...]:
        rng = random.Random(f"{self._seed}:{chunk.variant.number}:{chunk.variant.key.hex()}")  # noqa: S311 - no secret
        return tuple(sorted(rng.sample(range(chunk.variant.num_tokens), chunk.budget)))


def _highest(scores: Sequence[float], count: int) -> tuple[int, ...]:
    """Return the places of the ``count`` highest scores, sorted; of equals, the first."""
    ranked = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)
    return tuple(sorted(ranked[:count]))


SELECTIONS: dict[str, Callable[[], TokenSelection]] = {
    "cache_craft": CacheCraftSelection,
    "whole_chunks": WholeChunksSelection,
    "first_tokens": FirstTokensSelection,
    "question_driven": QuestionDrivenSelection,
    "most_attended": MostAttendedSelection,
    "random": RandomSelection,
}
"""Every selection by the name that configurations use."""


def make_selection(name: str) -> TokenSelection:
    """Return the selection of that name.

    Raises:
        ConfigError: there is none; the message lists those that there are.
    """
    if name not in SELECTIONS:
        raise ConfigError(f"selection is {name!r}; choose one of {', '.join(SELECTIONS)}")
    return SELECTIONS[name]()
