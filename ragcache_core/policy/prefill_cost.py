"""Cost of a prefill and a step: measured times, and the model between them."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Final, Protocol, Self

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


FORMAT: Final = 1
_LONGEST_DEFAULT: Final = 131_072


class PrefillCost(Protocol):
    """An estimate of T(alpha, beta), from a profile or a formula."""

    def estimate_s(self, num_cached_tokens: int, num_new_tokens: int, /) -> float:
        """Return the seconds to prefill ``num_new_tokens`` after ``num_cached_tokens``."""
        ...


@dataclass(frozen=True, slots=True)
class PrefillCostModel:
    """T(alpha, beta): seconds to prefill beta new tokens after alpha cached ones (RAGCache §5.1, Algorithm 1).

    ``seconds[i][j]`` was measured with ``cached_tokens[i]`` and ``new_tokens[j]``; both axes ascend, and each has two
    values at least.

    Raises:
        ConfigError: an axis or a time that cannot be.
    """

    cached_tokens: tuple[int, ...]
    new_tokens: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]
    _least_s: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_axis("cached_tokens", self.cached_tokens, smallest=0)
        _check_axis("new_tokens", self.new_tokens, smallest=1)
        num_rows, num_columns = len(self.cached_tokens), len(self.new_tokens)
        shapes = sorted({len(row) for row in self.seconds})
        if len(self.seconds) != num_rows or shapes != [num_columns]:
            raise ConfigError(
                f"seconds has {len(self.seconds)} rows of {shapes} times, the axes have {num_rows} and {num_columns} "
                "values: give a row for every cached length, with a time for every new one"
            )
        for num_cached_tokens, row in zip(self.cached_tokens, self.seconds, strict=True):
            for num_new_tokens, time_s in zip(self.new_tokens, row, strict=True):
                if isinstance(time_s, bool) or not isinstance(time_s, int | float) or not 0 < time_s < math.inf:
                    raise ConfigError(
                        f"seconds for {num_cached_tokens} cached and {num_new_tokens} new tokens is {time_s!r:.40}; a "
                        "time must be a positive, finite number: measure this point again"
                    )
        object.__setattr__(self, "_least_s", float(min(map(min, self.seconds))))

    @classmethod
    def default(cls) -> Self:
        """Return the model of an unprofiled engine: 7B parameters on one GPU, 1.0 s for 4,128 new tokens.

        T(a, b) = 0.028 + 1.25e-5 a + 2.1e-4 b + 1.2e-8 b (a + b / 2) seconds, sampled. It is linear in a, so that two
        cached lengths give it exactly; between the sampled b it is at most 3 % too high (1 % up to 16,384).
        """
        cached_tokens = (0, _LONGEST_DEFAULT)
        powers = [1 << power for power in range(1, _LONGEST_DEFAULT.bit_length())]
        new_tokens = (1, *sorted([*powers, *(power // 2 * 3 for power in powers[:-1])]))
        seconds = tuple(
            tuple(0.028 + 1.25e-5 * a + 2.1e-4 * b + 1.2e-8 * b * (a + b / 2) for b in new_tokens)
            for a in cached_tokens
        )
        return cls(cached_tokens, new_tokens, seconds)

    @classmethod
    def from_measured(cls, seconds: Mapping[tuple[int, int], float]) -> Self:
        """Return the model of measured times by (cached, new) tokens; those of the longest prompts may be missing.

        A prompt must fit into the context window, so a rectangle of lengths cannot be measured whole. A missing time
        continues those with as many new tokens in a straight line, which is how attention grows with what is cached;
        where only one of those is known, with the slope that fewer new tokens have.

        Raises:
            ConfigError: more is missing than that.
        """
        cached_tokens = tuple(sorted({num_cached_tokens for num_cached_tokens, _ in seconds}))
        new_tokens = tuple(sorted({num_new_tokens for _, num_new_tokens in seconds}))
        columns = []
        slope = 0.0
        for num_new_tokens in new_tokens:
            known = [a for a in cached_tokens if (a, num_new_tokens) in seconds]
            if known != list(cached_tokens[: len(known)]):
                raise ConfigError(
                    f"with {num_new_tokens} new tokens the cached lengths {known} were measured, of {cached_tokens}: "
                    "only the longest may be missing"
                )
            column = [seconds[a, num_new_tokens] for a in known]
            if len(known) > 1:
                slope = max(statistics.linear_regression(known, column).slope, 0.0)
            column += [column[-1] + slope * (a - known[-1]) for a in cached_tokens[len(known) :]]
            columns.append(column)
        return cls(cached_tokens, new_tokens, tuple(zip(*columns, strict=True)))

    def estimate_s(self, num_cached_tokens: int, num_new_tokens: int) -> float:
        """Return the seconds to prefill ``num_new_tokens`` after ``num_cached_tokens``.

        Exact at measured points, bilinear between them (RAGCache §5.1, Algorithm 1, lines 6 to 9), continued in
        straight lines beyond them, but never less than the shortest time that was measured; no new tokens take none.
        We differ: the paper asks for lengths strictly between two measured ones, ours may be equal to one.
        """
        if num_new_tokens <= 0:
            return 0.0
        alphas, betas = self.cached_tokens, self.new_tokens
        # The cell [low, high) of each axis; the first and the last one also serve what lies beyond them.
        i = bisect_right(alphas, num_cached_tokens, 1, len(alphas) - 1)
        j = bisect_right(betas, num_new_tokens, 1, len(betas) - 1)
        below, above = self.seconds[i - 1], self.seconds[i]
        u = (num_cached_tokens - alphas[i - 1]) / (alphas[i] - alphas[i - 1])
        v = (num_new_tokens - betas[j - 1]) / (betas[j] - betas[j - 1])
        t_low = (1.0 - u) * below[j - 1] + u * above[j - 1]
        t_high = (1.0 - u) * below[j] + u * above[j]
        time_s = (1.0 - v) * t_low + v * t_high
        return time_s if time_s > self._least_s else self._least_s

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON data."""
        return {
            "format": FORMAT,
            "cached_tokens": list(self.cached_tokens),
            "new_tokens": list(self.new_tokens),
            "seconds": [list(row) for row in self.seconds],
        }

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """Return the model of a :meth:`to_dict`.

        Raises:
            ConfigError: ``data`` is something else, or of another version.
        """
        match data:
            case {"format": int(version)} if version != FORMAT:
                raise ConfigError(
                    f"the prefill times have format {version}, this RAGCache reads {FORMAT}: measure again"
                )
            case {"format": int(), "cached_tokens": [*cached], "new_tokens": [*new], "seconds": [*rows]} if all(
                isinstance(row, list | tuple) for row in rows
            ):
                return cls(tuple(cached), tuple(new), tuple(tuple(row) for row in rows))
        raise ConfigError(
            f"{data!r:.80} are no prefill times: they need format, cached_tokens, new_tokens and seconds; measure again"
        )


def _check_axis(name: str, values: tuple[int, ...], *, smallest: int) -> None:
    if len(values) < 2:
        raise ConfigError(f"{name} is {values}; it needs two lengths at least: measure more of them")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
            raise ConfigError(f"{name} holds {value!r:.40}; a length is a whole number of tokens, {smallest} or more")
    for before, value in pairwise(values):
        if value <= before:
            raise ConfigError(f"{name} has {value} behind {before}: give every length once, in ascending order")
