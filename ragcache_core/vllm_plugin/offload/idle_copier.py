"""Time in which a worker has nothing to do: it has answered, and the scheduler makes the next step.

Without a GPU, what copies blocks to host memory is the processor that computes the model, and in that time it is free.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from ragcache_core.vllm_plugin.compat import connector_of_this_worker
from ragcache_core.vllm_plugin.offload.compat import copies_of_worker


class SpareTime:
    """Does work for its owner, in order and piece by piece, on a thread that runs while the owner does not.

    Only one of the two ever touches the work: the thread between :meth:`give` and :meth:`take`, the owner otherwise.
    """

    def __init__(self) -> None:
        self._work: deque[Iterator[object]] = deque()
        self._turn = threading.Condition()
        self._is_given = False
        self._is_closed = False
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    def add(self, work: Iterator[object]) -> None:
        """Take something to do; each step of the iterator is a piece, after which the owner may go on."""
        self.take()
        self._work.append(work)

    def give(self) -> None:
        """Let the thread work until :meth:`take`."""
        if not self._work or self._is_closed:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ragcache-spare-time", daemon=True)
            self._thread.start()
        with self._turn:
            self._is_given = True
            self._turn.notify()

    def take(self) -> None:
        """Return when the piece that is being done is done.

        Raises:
            BaseException: what the thread met with; that work is given up.
        """
        if self._is_given:
            self._is_given = False  # first: the thread looks at it after each piece, and holds its turn until then
            with self._turn:
                pass
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def do_next(self) -> None:
        """Do what was added first to its end, on the owner's thread."""
        self.take()
        for _ in self._work.popleft():
            pass

    def close(self) -> None:
        """End the thread; what is left to do is dropped."""
        with suppress(Exception):
            self.take()
        with self._turn:
            self._is_closed = True
            self._turn.notify()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._work.clear()

    def _run(self) -> None:
        while True:
            with self._turn:
                self._turn.wait_for(lambda: self._is_closed or (self._is_given and self._work))
                if self._is_closed:
                    return
                while self._is_given and self._work:
                    try:
                        if next(self._work[0], self) is self:
                            self._work.popleft()
                    except BaseException as failure:
                        self._work.popleft()
                        self._failure = failure
                        self._is_given = False


class CopyingInSpareTime:
    """What a platform's worker gets in addition: between its answer and the next step, its copies go on."""

    _spare_time: SpareTime | None = None

    def initialize_from_config(self, *args: Any, **kwargs: Any) -> None:
        super().initialize_from_config(*args, **kwargs)  # type: ignore[misc]
        self._spare_time = getattr(copies_of_worker(connector_of_this_worker()), "spare_time", None)

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        if self._spare_time is not None:
            self._spare_time.take()
        output = super().execute_model(*args, **kwargs)  # type: ignore[misc]
        if self._spare_time is not None and output is not None:  # else it is asked for a token first
            self._spare_time.give()
        return output

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        output = super().sample_tokens(*args, **kwargs)  # type: ignore[misc]
        if self._spare_time is not None:
            self._spare_time.give()
        return output
