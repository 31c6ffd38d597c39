"""What any retriever of the process returned, and a hint where prompts show none of it."""

from __future__ import annotations

from ragcache_core.client.prompts.request_plan import RememberedDocuments, RememberedSearch, RequestPlan
from ragcache_core.log import logger_of
from ragcache_core.types import SegmentKind

logger = logger_of(__name__)

_NUM_LONG_PROMPTS = 3
_LONG_PROMPT_TOKENS = 256
"""A prompt without documents is seldom longer."""

RETRIEVED = RememberedDocuments()
"""Documents that a framework saw any retriever return: every engine of the process recognises them in its prompts."""


class DocumentHint:
    """Warns once, where no long prompt shows a known document, and says how documents become known.

    Once some were known, only prompts that follow a search count: they may show what it found in other words.
    """

    def __init__(self, cure: str) -> None:
        """``cure`` are the framework's own ways."""
        self._cure = cure
        self._num_long_prompts = 0
        self._is_settled = self._is_told = False
        self._search: RememberedSearch | None = None

    def see(self, plan: RequestPlan) -> None:
        """Look at a request; one that the server renders says nothing, nor one that may only be about to search."""
        if self._is_told or plan.num_prompt_tokens is None or plan.asked is not None:
            return
        before, self._search = self._search, next(iter(RETRIEVED.searches()), None)
        if any(segment.kind is SegmentKind.DOCUMENT for segment in plan.segments):
            self._is_settled, self._num_long_prompts = True, 0
            return
        is_asked_for = not self._is_settled or self._search is not before
        self._num_long_prompts += is_asked_for and plan.num_prompt_tokens >= _LONG_PROMPT_TOKENS
        if self._num_long_prompts == _NUM_LONG_PROMPTS:
            self._is_told = True
            logger.warning(
                "RC-DOCUMENTS-UNKNOWN: %d prompts of %d tokens or more, and no known document in any: if they do hold "
                "documents, these are cached as unnamed text, and not in the statistics. %s",
                _NUM_LONG_PROMPTS,
                _LONG_PROMPT_TOKENS,
                self._cure,
            )
