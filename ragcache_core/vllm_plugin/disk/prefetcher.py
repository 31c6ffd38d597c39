"""Start disk reads while a request is queued, before vLLM reaches it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from ragcache_core.types import Tier
from ragcache_core.vllm_plugin.cache.controller import CacheController

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from ragcache_core.vllm_plugin.cache.kv_groups import BlockKey
    from ragcache_core.vllm_plugin.cache.request_state import Key
    from ragcache_core.vllm_plugin.offload.promises import Promises


_MAX_PROMPTS = 64
"""Prompts without a request that may wait for space; one more drops the oldest."""


class DiskPrefetcher:
    """Looks up queued requests in order of arrival, so that vLLM's tiering reads their blocks into host memory.

    Blocks read for a request are kept until it is admitted. All requests together keep at most half of host memory.
    Speculative requests come after real ones, and use only the first half of that. So do prompts without a request
    (:meth:`add_prompt`): their blocks are kept until all of them have arrived.

    Args:
        controller: knows which tiers hold a request's blocks.
        promises: of the host tier.
        look_up: vLLM's look-up of a request, with the number of its tokens on the GPU.
        end: ends a prompt without a request, after it was read or if it is not read.
    """

    def __init__(
        self,
        controller: CacheController,
        promises: Promises[BlockKey],
        look_up: Callable[[Request, int], object],
        end: Callable[[Request], None],
    ) -> None:
        self._controller = controller
        self._promises = promises
        self._look_up = look_up
        self._end = end
        self._real: deque[Request] = deque()
        self._speculative: deque[Request] = deque()
        self._prompts: deque[Request] = deque()
        self._unasked: dict[Request, int] = {}
        self._num_blocks: dict[str, int] = {}
        self._limit = controller.tiers[Tier.HOST].num_blocks // 2 // controller.groups.blocks_per_unit

    def add(self, request: Request) -> None:
        """Add a request that has arrived."""
        if not request.skip_reading_prefix_cache:
            is_speculative = self._controller.is_speculative(request.request_id)
            (self._speculative if is_speculative else self._real).append(request)

    def reads(self, request: Request) -> bool:
        """Return whether :meth:`add_prompt` would read anything."""
        _, num_below = self._blocks(self._controller.last_known(request.block_hashes))
        return 0 < num_below <= self._limit // 2

    def add_prompt(self, request: Request) -> None:
        """Add a prompt without a request; only the offloading treats it as a request."""
        self._prompts.append(request)
        if len(self._prompts) > _MAX_PROMPTS:
            self._end(self._prompts.popleft())

    @property
    def is_prefetching(self) -> bool:
        """Whether prompts without a request wait or are being read."""
        return bool(self._prompts or self._unasked)

    def remove(self, request_id: str) -> None:
        """Stop counting the host memory of a request."""
        self._num_blocks.pop(request_id, None)

    def begin_reads(self) -> None:
        """Begin reads for queued requests within the free space, after vLLM's admission."""
        for request, num_gpu_tokens in list(self._unasked.items()):
            if not self._promises.is_awaited(request.request_id, num_gpu_tokens):
                del self._unasked[request]
                self._end(request)
        for arrived, limit in ((self._real, self._limit), (self._speculative, self._limit // 2)):
            while arrived and self._begin(arrived[0], limit):
                arrived.popleft()
        while self._prompts and self._begin_prompt(self._prompts[0], self._limit // 2):
            self._prompts.popleft()

    def _begin_prompt(self, request: Request, limit: int) -> bool:
        num_gpu, num_below = self._blocks(self._controller.last_known(request.block_hashes))
        if not num_below or num_below > limit:
            self._end(request)
            return True
        if not self._has_room(num_below, limit):
            return False
        self._unasked[request] = num_gpu * self._controller.tokens_per_block
        self._read(request, num_gpu, num_below)
        return True

    def _begin(self, request: Request, limit: int) -> bool:
        """Return whether a request is finished; ``False`` if it waits for space."""
        state = self._controller.state_of(request.request_id)
        if state is None or state.admitted_s is not None or self._promises.is_looked_up(request.request_id):
            return True
        num_gpu, num_below = self._blocks(state.retained)
        if not num_below or num_below > limit:
            return True
        if not self._has_room(num_below, limit):
            return False
        self._read(request, num_gpu, num_below)
        return True

    def _blocks(self, last: Key | None) -> tuple[int, int]:
        """Return the number of leading blocks on the GPU, and of the following ones in lower tiers.

        The latter is 0 if none of them has to be read from disk.
        """
        num_gpu, num_fast, num_all = self._controller.leading_blocks(last)
        return num_gpu, num_all - num_gpu if num_all > num_fast else 0

    def _has_room(self, num_blocks: int, limit: int) -> bool:
        return sum(self._num_blocks.values()) + num_blocks <= limit

    def _read(self, request: Request, num_gpu: int, num_below: int) -> None:
        self._num_blocks[request.request_id] = num_below
        self._look_up(request, num_gpu * self._controller.tokens_per_block)
