"""What any retriever of the process returned, and a hint where prompts show none of it."""

from __future__ import annotations

from ragcache_core.client.prompts.request_plan import RememberedDocuments, RememberedSearch, RequestPlan
from ragcache_core.log import logger_of

logger = logger_of(__name__)

_NUM_LONG_PROMPTS = 3
_LONG_PROMPT_CHARS = 1024
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
        self._is_settled = self._is_reported = False
        self._search: RememberedSearch | None = None

    def observe(self, plan: RequestPlan) -> None:
        """Look at a request; one that may only be about to search says nothing."""
        if self._is_reported or plan.tool_chat is not None:
            return
        before, self._search = self._search, next(iter(RETRIEVED.searches()), None)
        if plan.doc_ids:
            self._is_settled, self._num_long_prompts = True, 0
            return
        is_requested = not self._is_settled or self._search is not before
        self._num_long_prompts += is_requested and plan.num_chars >= _LONG_PROMPT_CHARS
        if self._num_long_prompts == _NUM_LONG_PROMPTS:
            self._is_reported = True
            logger.warning(
                "RC-DOCUMENTS-UNKNOWN: %d prompts of %d characters or more, and no known document in any: if they do "
                "hold documents, these are cached as unnamed text, and not in the statistics. %s",
                _NUM_LONG_PROMPTS,
                _LONG_PROMPT_CHARS,
                self._cure,
            )
