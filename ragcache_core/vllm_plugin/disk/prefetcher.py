"""Reads from disk that begin while a request is queued, long before vLLM reaches it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from ragcache_core.types import Tier
from ragcache_core.vllm_plugin.cache.controller import CacheController

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from ragcache_core.vllm_plugin.offload.host_policy import TreeCachePolicy


class DiskPrefetcher:
    """Looks queued requests up as they arrived, which makes vLLM's tiering read what they need into host memory.

    What is read for a request is kept for it until it is admitted. All of them together keep half of host memory at
    most, and speculative requests, which come after the real ones, use the first half of that only.

    Args:
        controller: knows what of a request lies where.
        policy: of the host tier, which knows what was promised to whom.
        look_up: what vLLM asks when it reaches a request, with how many of its tokens the GPU holds.
    """

    def __init__(
        self, controller: CacheController, policy: TreeCachePolicy, look_up: Callable[[Request, int], object]
    ) -> None:
        self._controller = controller
        self._policy = policy
        self._look_up = look_up
        self._real: deque[Request] = deque()
        self._speculative: deque[Request] = deque()
        self._num_blocks: dict[str, int] = {}
        self._limit = controller.tiers[Tier.HOST].num_blocks // 2 // controller.groups.blocks_per_unit

    def add(self, request: Request) -> None:
        """Take in a request that has arrived."""
        if not request.skip_reading_prefix_cache:
            is_speculative = self._controller.is_speculative(request.request_id)
            (self._speculative if is_speculative else self._real).append(request)

    def remove(self, request_id: str) -> None:
        """Count no more what a request keeps in host memory."""
        self._num_blocks.pop(request_id, None)

    def begin_reads(self) -> None:
        """Begin to read for those that arrived, as far as there is room, after vLLM has admitted whom it could."""
        for arrived, limit in ((self._real, self._limit), (self._speculative, self._limit // 2)):
            while arrived and self._begin(arrived[0], limit):
                arrived.popleft()

    def _begin(self, request: Request, limit: int) -> bool:
        """Return whether a request is dealt with; False if it has to wait for room."""
        state = self._controller.state_of(request.request_id)
        if state is None or state.admitted_s is not None or self._policy.is_looked_up(request.request_id):
            return True
        num_gpu, num_below = self._controller.blocks_below(request.request_id)
        if not num_below or num_below > limit:
            return True
        if sum(self._num_blocks.values()) + num_below > limit:
            return False
        self._num_blocks[request.request_id] = num_below
        self._look_up(request, num_gpu * self._controller.tokens_per_block)
        return True
