"""Show how far a server has got with loading, from what it logs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType
from typing import Never

from tqdm import tqdm

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

    def __init__(self, *, enabled: bool, on_stage: Callable[[str], None] | None = None) -> None:
        self._enabled = enabled
        self._on_stage = on_stage
        self._stage = -1
        self._bar: tqdm[Never] | None = None

    @classmethod
    def of(cls, progress: bool | Callable[[str], None] | None) -> LoadProgress:
        """Return what a user's ``progress`` means: a function, yes, no, or (``None``) yes on a terminal."""
        if callable(progress):
            return cls(enabled=False, on_stage=progress)
        return cls(enabled=sys.stderr.isatty() if progress is None else progress)

    @classmethod
    def silent(cls) -> LoadProgress:
        return cls(enabled=False)

    def __enter__(self) -> LoadProgress:
        if self._enabled:
            self._bar = tqdm(
                total=len(STAGES), desc="engine", unit="stage", bar_format="{desc}: |{bar:24}| {postfix} [{elapsed}]"
            )
        return self

    def update(self, log: str) -> None:
        """Move to the last stage that ``log`` tells of."""
        reached = max((i for i, (_, sign) in enumerate(STAGES) if sign in log), default=0)
        if reached > self._stage:
            if self._bar is not None:
                self._bar.set_postfix_str(STAGES[reached][0], refresh=False)
                self._bar.update(reached - max(self._stage, 0))
            if self._on_stage is not None:
                self._on_stage(STAGES[reached][0])
            self._stage = reached
        elif self._bar is not None:
            self._bar.refresh()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar is not None:
            if kind is None:
                self._bar.set_postfix_str("ready", refresh=False)
                self._bar.update(len(STAGES) - self._bar.n)
            self._bar.close()
            self._bar = None
