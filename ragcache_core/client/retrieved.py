"""What the retrievers of a process returned, whoever made them, and a hint where prompts show none of it."""

from __future__ import annotations

import logging

from ragcache_core.client.plan import RememberedDocuments, RequestPlan
from ragcache_core.types import SegmentKind

_logger = logging.getLogger(__name__)

_NUM_LONG_PROMPTS = 3
_LONG_PROMPT_TOKENS = 256
"""A prompt without documents is seldom longer."""

RETRIEVED = RememberedDocuments()
"""Documents that a framework saw any retriever return: every engine of the process recognises them in its prompts."""


class DocumentHint:
    """Says once how documents become known, to somebody none of whose long prompts shows one that is."""

    def __init__(self, cure: str) -> None:
        """``cure`` are the framework's own ways."""
        self._cure = cure
        self._num_long_prompts = 0
        self._is_settled = False

    def see(self, plan: RequestPlan) -> None:
        """Look at a request; one that the server renders says nothing."""
        if self._is_settled or plan.num_prompt_tokens is None:
            return
        self._num_long_prompts += plan.num_prompt_tokens >= _LONG_PROMPT_TOKENS
        if any(segment.kind is SegmentKind.DOCUMENT for segment in plan.segments):
            self._is_settled = True
        elif self._num_long_prompts == _NUM_LONG_PROMPTS:
            self._is_settled = True
            _logger.warning(
                "%d prompts of %d tokens or more, and no known document in any: if they do hold documents, these are "
                "cached as text that nobody named, and not in the statistics. %s",
                _NUM_LONG_PROMPTS,
                _LONG_PROMPT_TOKENS,
                self._cure,
            )
