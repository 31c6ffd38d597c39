"""Reads from disk that begin while a request is queued, long before vLLM reaches it, or before anybody asks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from ragcache_core.types import Tier
from ragcache_core.vllm_plugin.cache.controller import CacheController

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from ragcache_core.vllm_plugin.cache.request_state import Key
    from ragcache_core.vllm_plugin.compat import OffloadKey
    from ragcache_core.vllm_plugin.offload.promises import Promises


_MAX_PROMPTS = 64
"""That nobody asks yet, and that wait for room; the first goes for one more."""


class DiskPrefetcher:
    """Looks queued requests up as they arrived, which makes vLLM's tiering read what they need into host memory.

    What is read for a request is kept for it until it is admitted. All of them together keep half of host memory at
    most, and speculative requests, which come after the real ones, use the first half of that only. So do prompts that
    nobody asks yet (:meth:`add_prompt`): what is read for them is kept until all of it has arrived.

    Args:
        controller: knows what of a request lies where.
        promises: of the host tier.
        look_up: what vLLM asks when it reaches a request, with how many of its tokens the GPU holds.
        end: takes a prompt that nobody asks when it has been read, or is not read after all.
    """

    def __init__(
        self,
        controller: CacheController,
        promises: Promises[OffloadKey],
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
        """Take in a request that has arrived."""
        if not request.skip_reading_prefix_cache:
            is_speculative = self._controller.is_speculative(request.request_id)
            (self._speculative if is_speculative else self._real).append(request)

    def reads(self, request: Request) -> bool:
        """Return whether :meth:`add_prompt` would read anything."""
        _, num_below = self._blocks(self._controller.last_known(request.block_hashes))
        return 0 < num_below <= self._limit // 2

    def add_prompt(self, request: Request) -> None:
        """Take in a prompt that nobody asks yet, as a request that arrived in the offloading, and nowhere else."""
        self._prompts.append(request)
        if len(self._prompts) > _MAX_PROMPTS:
            self._end(self._prompts.popleft())

    @property
    def is_prefetching(self) -> bool:
        """Whether there is something to do for prompts that nobody asks yet, with requests in the engine or without."""
        return bool(self._prompts or self._unasked)

    def remove(self, request_id: str) -> None:
        """Count no more what a request keeps in host memory."""
        self._num_blocks.pop(request_id, None)

    def begin_reads(self) -> None:
        """Begin to read for those that arrived, as far as there is room, after vLLM has admitted whom it could."""
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
        """Return whether a request is dealt with; False if it has to wait for room."""
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
        """Return how many leading blocks the GPU holds, and how many behind them lower tiers do.

        0 of those where none would have to be read from disk.
        """
        num_gpu, num_fast, num_all = self._controller.leading_blocks(last)
        return num_gpu, num_all - num_gpu if num_all > num_fast else 0

    def _has_room(self, num_blocks: int, limit: int) -> bool:
        return sum(self._num_blocks.values()) + num_blocks <= limit

    def _read(self, request: Request, num_gpu: int, num_below: int) -> None:
        self._num_blocks[request.request_id] = num_below
        self._look_up(request, num_gpu * self._controller.tokens_per_block)
