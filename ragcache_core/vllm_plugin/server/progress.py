"""Probe the engine core while no other call does, and report on ``/health`` when it hangs.

vLLM's ``/health`` checks whether the engine's process exists. The core answers a call between two steps, or at once
when it is idle, asleep or paused. A core that has not answered works or hangs: ``runtime/hangs.py``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from ragcache_core.errors import ConfigError
from ragcache_core.log import logger_of
from ragcache_core.runtime.environment import HANG_TIMEOUT_ENV
from ragcache_core.runtime.hangs import HangDetector, ProcessUse, read_engine_use
from ragcache_core.vllm_plugin.engine_death import wait_for_exit

logger = logger_of(__name__)

DEFAULT_HANG_TIMEOUT_S = 30.0
_LOOKS_PER_LIMIT = 10
_MAX_LOOK_S = 1.0


class EngineProgress:
    """Knows whether the engine makes progress. :meth:`watch` runs as long as the server.

    Attributes:
        hang: why the engine hangs; ``None`` while it does not.
    """

    def __init__(
        self,
        ask: Callable[[], Awaitable[object]],
        read: Callable[[], Mapping[int, ProcessUse]],
        *,
        limit_s: float,
        step_limit_s: float | None = None,
        all_work: bool = True,
    ) -> None:
        """``ask`` returns when the engine core has answered; ``read`` what its processes have used."""
        self.hang: str | None = None
        self._ask = ask
        self._read = read
        self._limit_s = limit_s
        self._step_limit_s = step_limit_s
        self._all_work = all_work
        self._look_s = min(limit_s / _LOOKS_PER_LIMIT, _MAX_LOOK_S)

    @classmethod
    def of(cls, engine_client: Any, limit_s: float, starter_pid: int) -> EngineProgress:
        """Return the progress of the engine that a process started. It has the call that answers whether it sleeps.

        Where processor time says nothing, as on a GPU, a step may take as long as vLLM lets a worker's take.
        """
        from vllm import envs
        from vllm.platforms import current_platform

        parallel = engine_client.vllm_config.parallel_config
        return cls(
            lambda: wait_for_exit(engine_client, engine_client.is_sleeping()),
            lambda: read_engine_use(starter_pid, envs.VLLM_PROCESS_NAME_PREFIX),
            limit_s=limit_s,
            step_limit_s=None if current_platform.is_cpu() else float(envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS),
            all_work=parallel.pipeline_parallel_size == 1 and parallel.data_parallel_size == 1,
        )

    async def watch(self) -> None:
        """Ask again and again. Returns when the engine has died, which vLLM sees itself."""
        while await self._is_answered():  # noqa: ASYNC110 (a pause, not a wait)
            await asyncio.sleep(self._look_s)

    async def _is_answered(self) -> bool:
        """Return whether the engine lives, when it has said so, however late."""
        answer = asyncio.ensure_future(self._ask())
        detector = HangDetector(
            limit_s=self._limit_s, look_s=self._look_s, step_limit_s=self._step_limit_s, all_work=self._all_work
        )
        try:
            while not (await asyncio.wait([answer], timeout=self._look_s))[0]:
                uses = await asyncio.to_thread(self._read)
                hang = detector.look(asyncio.get_running_loop().time(), uses)
                if hang is not None and self.hang is None:
                    logger.error(
                        "RC-ENGINE-HANGS: the engine hangs, /health answers 503 until it makes progress: %s", hang
                    )
                self.hang = hang
        finally:
            answer.cancel()
        if self.hang is not None:
            logger.warning("RC-ENGINE-PROGRESSES: the engine makes progress again")
        self.hang = None
        if (error := answer.exception()) is not None:
            logger.info("The engine's progress is not watched any more: %s", error)
        return error is None


def hang_timeout_s(environ: Mapping[str, str]) -> float | None:
    """Return after how many seconds a process that stands still hangs; ``None`` is never.

    Raises:
        ConfigError: the variable says something else.
    """
    configured = environ.get(HANG_TIMEOUT_ENV, "")
    try:
        limit_s = float(configured) if configured else DEFAULT_HANG_TIMEOUT_S
    except ValueError:
        limit_s = -1.0
    if not 0 <= limit_s < float("inf"):
        raise ConfigError(
            f"{HANG_TIMEOUT_ENV} is {configured!r:.40}; it must be a number of seconds, or 0 for no limit"
        )
    return limit_s or None
