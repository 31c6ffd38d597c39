"""Results of a comparison: its options, the machine, and each finished run; the file keeps them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from ragcache_core.errors import ConfigError
from ragcache_core.private_files import make_folders, replacing

VERSION = 1


@dataclass(frozen=True, slots=True)
class TimedRun:
    """Measurements of one engine at one rate: times of each request, and counts."""

    engine: str
    host_bytes: int
    seed: int
    rate: int
    requests_per_s: float
    duration_s: float
    ttft_s: tuple[float, ...]
    tpot_s: tuple[float, ...]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_reordered: int
    tokens_by_tier: Mapping[str, int] = field(default_factory=dict)
    cpu_s: float | None = None

    @property
    def key(self) -> tuple[str, int, int, int]:
        """Engine, host memory, seed, rate."""
        return self.engine, self.host_bytes, self.seed, self.rate

    @property
    def completed_rps(self) -> float:
        """Answered requests a second, from the first arrival to the last answer."""
        return len(self.ttft_s) / self.duration_s

    @property
    def cached_share(self) -> float:
        """Share of prompt tokens that some tier served."""
        return self.num_cached_tokens / self.num_prompt_tokens

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        data = asdict(self)
        return {"peer": data.pop("engine"), **data}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the run of a :meth:`to_dict`, also of earlier versions with more fields.

        Raises:
            TypeError, LookupError: ``data`` is not such a dictionary.
        """
        known = {name: data[name] for name in cls.__slots__ if name in data}
        times = {name: tuple(data[name]) for name in ("ttft_s", "tpot_s")}
        return cls(**{**known, **times, "engine": data["peer"]})


class Results:
    """Runs of a comparison. Each new run is written to the file at once, so that an interruption loses none.

    Args:
        path: the file.
        options: what was compared; to continue, they must be the same.
        machine: where it was measured.
    """

    def __init__(self, path: Path, options: Mapping[str, Any], machine: Mapping[str, Any]) -> None:
        self.path = path
        self.options = dict(options)
        self.machine = dict(machine)
        self.rates_rps: tuple[float, ...] = ()
        self.capacity_rps: float | None = None
        self.runs: list[TimedRun] = []

    @classmethod
    def open(
        cls, path: Path, options: Mapping[str, Any], machine: Mapping[str, Any], *, resume: bool = False
    ) -> Results:
        """Return empty results, or those in the file with ``resume``.

        Raises:
            ConfigError: the file exists and ``resume`` is False, its options differ, or it is another kind of file.
        """
        check_is_new(path, resume=resume)
        if not path.exists():
            return cls(path, options, machine)
        kept = cls.read(path)
        for name, value in json.loads(json.dumps({**dict.fromkeys(kept.options), **options})).items():
            if value != kept.options.get(name):
                raise ConfigError(
                    f"{path} was measured with {name} = {kept.options.get(name)!r:.120}, not {value!r:.120}: "
                    "resume with the same options, trace and version, or choose another --output"
                )
        kept.machine = {name: _both(kept.machine.get(name), value) for name, value in machine.items()}
        return kept

    @classmethod
    def read(cls, path: Path) -> Results:
        """Return the results in a file.

        Raises:
            ConfigError: the file cannot be read, or is not that of a comparison.
        """
        try:
            data = json.loads(path.read_bytes())
            results = cls(path, data["options"], data["machine"])
            version = data["version"]
            results.rates_rps = tuple(data["rates_rps"])
            results.capacity_rps = data["capacity_rps"]
            results.runs = [TimedRun.from_dict(run) for run in data["runs"]]
        except OSError as error:
            raise ConfigError(f"{path} cannot be read ({error.strerror}): name the file of a comparison") from error
        except (ValueError, LookupError, TypeError) as error:
            raise ConfigError(
                f"{path} is not the file of a comparison ({error!r:.120}): name one that 'ragcache bench' wrote"
            ) from error
        if version != VERSION:
            raise ConfigError(f"{path} has version {version!r:.20}, this reads {VERSION}: measure again")
        return results

    def set_rates(self, rates_rps: tuple[float, ...], capacity_rps: float | None) -> None:
        """Store the rates in requests per second, and the capacity if they are shares of it."""
        self.rates_rps, self.capacity_rps = rates_rps, capacity_rps
        self.write()

    def add(self, run: TimedRun) -> None:
        """Store a finished run."""
        self.runs.append(run)
        self.write()

    def write(self) -> None:
        """Write the file. Atomic: after an error the file is unchanged.

        Raises:
            OSError: the disk is full, or the folder is not writable.
        """
        make_folders(self.path.parent)
        with replacing(self.path) as file:
            file.write(json.dumps(self.to_dict()).encode() + b"\n")

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return {
            "version": VERSION,
            "options": self.options,
            "machine": self.machine,
            "capacity_rps": self.capacity_rps,
            "rates_rps": list(self.rates_rps),
            "runs": [run.to_dict() for run in self.runs],
        }


def check_is_new(path: Path, *, resume: bool) -> None:
    """Reject replacing an existing file.

    Raises:
        ConfigError: the file exists and ``resume`` is False.
    """
    if path.exists() and not resume:
        raise ConfigError(f"{path} exists already: continue with --resume, or choose another --output")


def _both(before: Any, now: Any) -> Any:
    """Return a fact of the machine; both values if it has changed."""
    return now if before is None or before == now else f"{before}, then {now}"
