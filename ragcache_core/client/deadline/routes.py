"""What an engine says to those who have a deadline: what was measured of its model, and how much it has to do.

::

    GET /v1/ragcache/costs  {"prefill": {...}, "chunk_reuse": {"alpha": 1.7, "points": [...]}}     asked once
    GET /v1/ragcache/load   {"num_pending_prefills": 3, "pending_prefill_s": 0.41, ...}            asked each time
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

import httpx

from ragcache_core.chunk import AlphaPoint
from ragcache_core.client.http.attempt import SENT_ONCE
from ragcache_core.deadline import MeasuredReuse
from ragcache_core.policy import PrefillCostModel

_COSTS_TIMEOUT_S = 2.0
_COSTS_AGAIN_S = 60.0
"""A server that did not report costs is asked again after so long: another one may be there by then."""
_LOAD_TIMEOUT_S = 0.1
"""Asking is a part of what the user waits for."""

_NO_REUSE = "the engine was started without chunk reuse"
_NOT_SAID = "the server did not say what its engine takes"
_UNSUPPORTED = "the server runs without RAGCache, or with an older one"
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineCosts:
    """Prefill times, and chunk reuse; or why they are not known, or not to be had."""

    prefill: PrefillCostModel | str
    reuse: MeasuredReuse | str


class DeadlineRoutes:
    """Asks one server. May be used by any thread."""

    def __init__(self, base_url: str, api_key: str, http: httpx.Client) -> None:
        """``base_url`` ends in ``/v1``; the client stays its owner's."""
        self._url = f"{base_url}/ragcache"
        self._http = http
        self._headers = {"Authorization": f"Bearer {api_key}"}
        self._costs: EngineCosts | None = None
        self._unknown = EngineCosts(_NOT_SAID, _NOT_SAID)
        self._ask_again_at_s = 0.0

    def costs(self) -> EngineCosts:
        """Return the measured costs of the engine's model. Never fails; after a failure it asks once a minute."""
        if self._costs is None and time.monotonic() >= self._ask_again_at_s:
            try:
                response = self._get("costs", _COSTS_TIMEOUT_S)
                if response.status_code == 404:
                    self._unknown = EngineCosts(_UNSUPPORTED, _UNSUPPORTED)
                else:
                    self._costs = _read_costs(response.raise_for_status().json())
            except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
                _logger.debug("the engine's costs are unknown: %s: %s", type(error).__name__, error)
                self._unknown = EngineCosts(_NOT_SAID, _NOT_SAID)
            self._ask_again_at_s = time.monotonic() + _COSTS_AGAIN_S
        return self._costs or self._unknown

    def queue_s(self) -> float | None:
        """Return how long the engine computes for requests that came before; None if it does not say. Never fails."""
        try:
            return float(self._get("load", _LOAD_TIMEOUT_S).raise_for_status().json()["pending_prefill_s"])
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            _logger.debug("the engine's load is unknown: %s: %s", type(error).__name__, error)
            return None

    def _get(self, name: str, timeout_s: float) -> httpx.Response:
        url = f"{self._url}/{name}"
        return self._http.get(url, headers=self._headers, timeout=timeout_s, extensions=SENT_ONCE)


def _read_costs(said: Any) -> EngineCosts:
    prefill: PrefillCostModel | str = "how long its prefills take was not measured: run 'ragcache profile', and restart"
    if said["prefill"] is not None:
        prefill = PrefillCostModel.from_dict(said["prefill"])
    reuse: MeasuredReuse | str = _NO_REUSE
    if (told := said["chunk_reuse"]) is not None:
        reuse = MeasuredReuse(float(told["alpha"]), tuple(AlphaPoint(**point) for point in told["points"]))
    return EngineCosts(prefill, reuse)
