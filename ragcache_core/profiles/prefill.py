"""Saved prefill times: one file per model and hardware."""

from __future__ import annotations

import os
import platform
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self, cast

from ragcache_core.errors import ConfigError
from ragcache_core.policy.prefill_cost import PrefillCostModel, StepTimes
from ragcache_core.profiles.files import kept_path, model_identity, read_json, write_json

FORMAT = 1
_OF_KV = ("tokens_per_gib", "host_gib_per_s")
_KIND = "ragcache profile"


@dataclass(frozen=True, slots=True)
class Profile:
    """A cost model, and its model and hardware.

    ``model`` is a :func:`~ragcache_core.profiles.files.model_identity`, ``hardware`` a :func:`hardware_name`,
    ``measured_at`` a date and time in ISO 8601. ``spread`` is how far the times of a point lie apart, as a share of
    their median: the median of the points. What was not asked for, and so not measured, is ``None``: the steps of
    several requests, the size of KV, and how fast it comes from host memory.
    """

    model: str
    hardware: str
    measured_at: str
    vllm_version: str
    dtype: str
    num_repeats: int
    spread: float
    cost_model: PrefillCostModel
    steps: StepTimes | None = None
    tokens_per_gib: float | None = None
    host_gib_per_s: float | None = None

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON data."""
        facts = {key: value for key, value in asdict(self).items() if key != "cost_model" and value is not None}
        return {"kind": _KIND, "format": FORMAT, **facts, "cost_model": self.cost_model.to_dict()}

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """Return the profile of a :meth:`to_dict`.

        Raises:
            ConfigError: ``data`` is something else, or of another version.
        """
        match data:
            case {"kind": kind, "format": int(version)} if kind == _KIND and version != FORMAT:
                raise ConfigError(f"its format is {version}, this RAGCache reads format {FORMAT}")
            case {
                "kind": kind,
                "model": str(model),
                "hardware": str(hardware),
                "measured_at": str(measured_at),
                "vllm_version": str(vllm_version),
                "dtype": str(dtype),
                "num_repeats": int(num_repeats),
                "spread": int(spread) | float(spread),
                "cost_model": cost_model,
                **more,
            } if kind == _KIND and all(isinstance(more.get(name, 0.0), int | float) for name in _OF_KV):
                times = PrefillCostModel.from_dict(cost_model)
                steps = None if more.get("steps") is None else StepTimes.from_dict(more["steps"])
                tokens_per_gib, host_gib_per_s = (cast("float | None", more.get(name)) for name in _OF_KV)
                return cls(
                    model, hardware, measured_at, vllm_version, dtype, num_repeats, spread, times, steps,
                    tokens_per_gib, host_gib_per_s,
                )  # fmt: skip
        raise ConfigError("the file is not a profile")


def hardware_name(proc: Path = Path("/proc")) -> str:
    """Return the hardware on which prefill times depend: GPUs, or processor and cores.

    It is read from ``proc``, so that it needs no CUDA and is the same in every process.
    """
    gpus = Counter(
        model
        for path in proc.glob("driver/nvidia/gpus/*/information")
        if (model := _first_value(path, "Model")) is not None
    )
    if gpus:
        return ", ".join(f"{count} x {model}" for model, count in sorted(gpus.items()))
    processor = _first_value(proc / "cpuinfo", "model name") or platform.machine() or "unknown processor"
    return f"{processor}, {os.cpu_count() or 1} cores"


def profile_path(model: str, hardware: str | None = None) -> Path:
    """Return the path of the profile of ``model`` on this hardware, existing or not."""
    return kept_path("profiles", model_identity(model), hardware or hardware_name())


def find_profile(model: str) -> Path | None:
    """Return the path of the profile of ``model`` on this hardware; ``None`` if there is none."""
    path = profile_path(model)
    return path if path.is_file() else None


def check_writable(path: Path) -> None:
    """Reject an unwritable path before the measurement.

    Raises:
        ConfigError: it is a folder, or below a file or a folder that cannot be written to.
    """
    if path.is_dir():
        raise ConfigError(f"{path} is a folder: name a file for the profile")
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"no profile can be written to {path}: {folder} is no writable folder; name another file")


def save_profile(profile: Profile, path: Path) -> None:
    """Write ``profile`` to ``path``, and create its folder. Atomic.

    Raises:
        OSError: the disk is full, or the folder cannot be written to.
    """
    write_json(profile.to_dict(), path)


def load_profile(path: Path) -> PrefillCostModel:
    """Return the cost model of the profile at ``path``.

    Raises:
        ConfigError: the file cannot be read, is damaged, or was written by another version.
    """
    return read_json(path, Profile.from_dict, "the profile", "run 'ragcache profile' again").cost_model


def _first_value(path: Path, key: str) -> str | None:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    values = (value.strip() for name, _, value in (line.partition(":") for line in lines) if name.strip() == key)
    return next(filter(None, values), None)
