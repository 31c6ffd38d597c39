"""vLLM's queue of waiting requests: real ones by scheduling priority, then speculative ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from ragcache_core.queueing import CacheAwareQueue
from ragcache_core.vllm_plugin.compat import RequestQueue, RequestStatus

if TYPE_CHECKING:
    from vllm.v1.request import Request


class CacheAwareRequestQueue(RequestQueue):
    """Real requests in a :class:`~ragcache_core.queueing.CacheAwareQueue`, then speculative ones by arrival.

    Three methods differ from vLLM's: ``len`` counts all requests, which keeps the engine core going; the truth value
    is whether a request may be admitted now; and ``peek_request`` returns the request that ``pop_request`` takes.

    Args:
        real: the queue of real requests.
        is_speculative: whether a request is speculative. vLLM enqueues a request before its connector has read its
            metadata, so this is first called at the next access to the queue.
    """

    def __init__(self, real: CacheAwareQueue[Request], is_speculative: Callable[[Request], bool]) -> None:
        self.real = real
        self._num_allowed = 0
        self._is_speculative = is_speculative
        self._arrived: list[Request] = []
        self._speculative: deque[Request] = deque()

    @property
    def num_real(self) -> int:
        """Number of waiting real requests."""
        self._sort_in()
        return len(self.real)

    @property
    def speculative(self) -> Sequence[Request]:
        """The waiting speculative requests, in the order of their admission."""
        self._sort_in()
        return self._speculative

    def allow_speculative(self, num_requests: int) -> None:
        """Set how many speculative requests may be admitted in the rest of this step."""
        self._num_allowed = num_requests

    def confirm(self, request: Request) -> bool:
        """Move a confirmed request to the real ones, and return whether it is queued here."""
        self._sort_in()
        if request in self._speculative:
            self._speculative.remove(request)
            self.real.add(request)
        return request in self.real

    # What vLLM asks

    def add_request(self, request: Request) -> None:
        self._arrived.append(request)

    def peek_request(self) -> Request:
        self._sort_in()
        if self.real:
            return self.real.peek()
        if not self._speculative:
            raise IndexError("peek from an empty queue")
        return self._speculative[0]

    def pop_request(self) -> Request:
        self._sort_in()
        if self.real:
            return self.real.pop()
        if not self._speculative:
            raise IndexError("pop from an empty queue")
        self._num_allowed -= 1
        return self._speculative.popleft()

    def prepend_request(self, request: Request) -> None:
        if self._is_speculative(request):
            self._speculative.appendleft(request)
        elif request.status == RequestStatus.PREEMPTED:
            self.real.put_first(request)
        else:
            self.real.give_back(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.prepend_request(request)

    def remove_request(self, request: Request) -> None:
        self._sort_in()
        if not self.real.remove(request):
            self._speculative.remove(request)

    def remove_requests(self, requests: Iterable[Request]) -> None:
        self._sort_in()
        gone = {request for request in requests if not self.real.remove(request)}
        if gone and self._speculative:
            self._speculative = deque(request for request in self._speculative if request not in gone)

    def __bool__(self) -> bool:
        self._sort_in()
        return bool(self.real) or (bool(self._speculative) and self._num_allowed > 0)

    def __len__(self) -> int:
        return len(self._arrived) + len(self.real) + len(self._speculative)

    def __iter__(self) -> Iterator[Request]:
        self._sort_in()
        yield from self.real
        yield from self._speculative

    def _sort_in(self) -> None:
        if not self._arrived:
            return
        for request in self._arrived:
            if self._is_speculative(request):
                self._speculative.append(request)
            else:
                self.real.add(request)
        self._arrived.clear()
