"""Counts the bytecode instructions of RAGCache, which depend on the scene and not on the machine."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import ragcache_core

_PACKAGE = str(Path(ragcache_core.__file__).parent)


class InstructionCounter:
    """Counts the instructions of this thread in functions of :mod:`ragcache_core`, without those of vLLM.

    Work in C is not counted: a comprehension over all requests is, and ``set(requests)`` is not.

    Attributes:
        by_code: instructions of each function.
    """

    def __init__(self) -> None:
        self.by_code: Counter[CodeType] = Counter()
        self._before: Any = None

    def enable(self) -> None:
        """Begin to count in functions that are called from now on."""
        self._before = sys.gettrace()
        sys.settrace(self._on_call)

    def disable(self) -> None:
        """Stop counting."""
        sys.settrace(self._before)

    def take(self) -> dict[str, int]:
        """Return the instructions of each function since the last call, the most first."""
        taken: Counter[str] = Counter()  # comprehensions of one function have one name
        for code, count in self.by_code.items():
            taken[f"{code.co_filename.removeprefix(_PACKAGE)}:{code.co_qualname}"] += count
        self.by_code.clear()
        return dict(taken.most_common())

    def _on_call(self, frame: FrameType, event: str, arg: object) -> Any:
        if not frame.f_code.co_filename.startswith(_PACKAGE):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._on_instruction

    def _on_instruction(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "opcode":
            self.by_code[frame.f_code] += 1
        return self._on_instruction
