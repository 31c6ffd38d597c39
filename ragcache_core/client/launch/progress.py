"""Show how far a server has got with loading, from what it logs."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from ragcache_core.runtime.terminal import Bar

STAGES = (
    ("starting", ""),
    ("reading the model's configuration", "Resolved architecture"),
    ("starting the engine", "Initializing a V1 LLM engine"),
    ("loading weights", "Starting to load model"),
    ("allocating the KV cache", "GPU KV cache size"),
    ("starting the server", "Starting vLLM server"),
)
"""Stages of a start, each with the words that vLLM logs when it begins. A word that moves costs a label only."""


class LoadProgress:
    """A progress bar over the stages of a start; a context manager.

    ``on_stage`` is told each new stage instead of a bar being drawn.
    """

    def __init__(self, *, enabled: bool | None, on_stage: Callable[[str], None] | None = None) -> None:
        self._bar = Bar("engine", len(STAGES), "stages", enabled=enabled, is_kept=True, has_remaining=False)
        self._on_stage = on_stage
        self._stage = -1

    @classmethod
    def of(cls, progress: bool | Callable[[str], None] | None) -> LoadProgress:
        """Return what a user's ``progress`` means: a function, yes, no, or (``None``) yes on a terminal."""
        if callable(progress):
            return cls(enabled=False, on_stage=progress)
        return cls(enabled=progress)

    @classmethod
    def silent(cls) -> LoadProgress:
        return cls(enabled=False)

    def __enter__(self) -> LoadProgress:
        self._bar.__enter__()
        return self

    def update(self, log: str) -> None:
        """Move to the last stage that ``log`` tells of."""
        reached = max((i for i, (_, sign) in enumerate(STAGES) if sign in log), default=0)
        if reached > self._stage:
            self._bar.say(f"engine: {STAGES[reached][0]}")
            self._bar.move_to(reached)
            if self._on_stage is not None:
                self._on_stage(STAGES[reached][0])
            self._stage = reached

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self._bar.say("engine: ready")
            self._bar.move_to(len(STAGES))
        self._bar.__exit__(kind, error, tb)
