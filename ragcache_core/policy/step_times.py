"""Measured times of an engine's steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Self

from ragcache_core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Measured times of an engine's steps, in seconds.

    Attributes:
        request_s: of a request outside its steps: the client sends it, the server parses it and answers.
        step_s: of a step, independent of its tokens.
        sequence_s: that each decoding sequence adds to a step.
    """

    request_s: float
    step_s: float
    sequence_s: float

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """Return the times in the data of a profile.

        Raises:
            ConfigError: fields are missing or unknown, or a value is not a time.
        """
        names = [field.name for field in fields(cls)]
        if not isinstance(data, dict) or set(data) != set(names):
            raise ConfigError(f"steps is {data!r:.80}; it has {', '.join(names)}")
        return cls(*(read_number(data, name, None) for name in names))


def read_number(data: Mapping[str, object], key: str, default: float | None) -> float:
    """Return a number of 0 or more from the data of a profile.

    Raises:
        ConfigError: the value is something else, or it is missing and has no ``default``.
    """
    value = data.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e15:
        raise ConfigError(f"{key} is {value!r:.40}; it must be a number of 0 or more")
    return float(value)
