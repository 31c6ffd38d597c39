"""The search fields of both frameworks' events."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ragcache_core.client.pipeline.result import similarities
from ragcache_core.client.pipeline.run import PipelineEvent

if TYPE_CHECKING:
    from ragcache_core.retrieval.base import Metric


def similarities_of(event: PipelineEvent, metric: Metric | None) -> list[float]:
    """Return the known scores of a stage as similarities; larger is nearer."""
    return similarities([float(score) for score in event.scores if not math.isnan(score)], metric)
