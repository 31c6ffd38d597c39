"""The file of a comparison: what was asked for, on what machine, and every run that is finished."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ragcache_core.bench.compare.sessions import Run
from ragcache_core.errors import ConfigError
from ragcache_core.private_files import make_folders, replacing

VERSION = 1
_THEN = ", then "


class Results:
    """Runs, written to their file whole each time that one is added: an interruption loses none of them."""

    def __init__(self, path: Path, options: Mapping[str, Any], machine: Mapping[str, Any]) -> None:
        self.path = path
        self.options = dict(options)
        self.machine = dict(machine)
        self._machine_now = self.machine
        self.rates_rps: tuple[float, ...] = ()
        self.capacity_rps: float | None = None
        self.runs: list[Run] = []
        self.summary: Mapping[str, Any] = {}

    @classmethod
    def open(
        cls, path: Path, options: Mapping[str, Any], machine: Mapping[str, Any], *, resume: bool = False
    ) -> Results:
        """Return the results in the file, to go on with, or empty ones where there is no file.

        Raises:
            ConfigError: a file is there and ``resume`` was not asked for, it was made with other options, of another
                trace or by another version, or it is not such a file.
        """
        fresh = cls(path, options, machine)
        check_is_new(path, resume=resume)
        if not path.exists():
            return fresh
        kept = cls.read(path)
        kept.check_same({**dict.fromkeys(kept.options), **options})
        kept._machine_now = dict(machine)
        return kept

    @classmethod
    def read(cls, path: Path) -> Results:
        """Return the results in a file.

        Raises:
            ConfigError: it cannot be read, or is not the file of a comparison.
        """
        try:
            data = json.loads(path.read_bytes())
            results = cls(path, data["options"], data["machine"])
            if data["version"] != VERSION:
                raise ConfigError(f"{path} has version {data['version']!r:.20}, this reads {VERSION}: measure anew")
            results.rates_rps = tuple(data["rates_rps"])
            results.capacity_rps = data["capacity_rps"]
            results.runs = [Run.from_dict(run) for run in data["runs"]]
        except OSError as error:
            raise ConfigError(f"{path} cannot be read ({error.strerror}): name the file of a comparison") from error
        except ConfigError:
            raise
        except (ValueError, LookupError, TypeError) as error:
            raise ConfigError(
                f"{path} is not the file of a comparison ({error!r:.120}): name one that 'ragcache bench' wrote"
            ) from error
        return results

    def check_same(self, options: Mapping[str, Any]) -> None:
        """Refuse to go on with other ``options``; what these leave open may be anything.

        Raises:
            ConfigError: with the first that differs.
        """
        for name, value in json.loads(json.dumps(options)).items():
            if value != self.options.get(name):
                raise ConfigError(
                    f"{self.path} was measured with {name} = {self.options.get(name)!r:.120}, not {value!r:.120}: "
                    "resume with the same options, trace and version, or choose another --output"
                )

    def set_rates(self, rates_rps: tuple[float, ...], capacity_rps: float | None) -> None:
        """Keep the rates that were decided, and by what capacity of an engine without a cache."""
        self.rates_rps, self.capacity_rps = rates_rps, capacity_rps
        self.write()

    def add(self, run: Run) -> None:
        """Add a run that is finished; where the machine or the code is another than before, both are named."""
        self.runs.append(run)
        self.machine = {name: _then(self.machine.get(name), value) for name, value in self._machine_now.items()}
        self.write()

    def write(self) -> None:
        """Write the file. Atomic: when this raises, what was there before still is.

        Raises:
            OSError: the disk is full, or the folder cannot be written to.
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
            "summary": self.summary,
            "runs": [run.to_dict() for run in self.runs],
        }


def check_is_new(path: Path, *, resume: bool) -> None:
    """Refuse to replace a file that is there; to ``resume`` goes on with it.

    Raises:
        ConfigError: with what to do.
    """
    if path.exists() and not resume:
        raise ConfigError(f"{path} is there already: --resume goes on with it, another --output starts anew")


def _then(before: Any, now: Any) -> Any:
    """Return a fact of the machine with which runs were measured, and behind it that of those which follow."""
    if before is None:
        return now
    return before if str(before).split(_THEN)[-1] == str(now) else f"{before}{_THEN}{now}"
