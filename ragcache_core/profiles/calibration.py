"""Saved qualities of chunk reuse: one file per model and selection."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self, get_args

from ragcache_core.chunk import AlphaPoint
from ragcache_core.errors import ConfigError
from ragcache_core.profiles.files import kept_path, model_identity, read_json, write_json
from ragcache_core.types import SelectionName

FORMAT = 1
_KIND = "ragcache calibration"


@dataclass(frozen=True, slots=True)
class Calibration:
    """The results of several alphas on a validation set (Cache-Craft §3.2, Eq. 13).

    ``model`` is a :func:`~ragcache_core.profiles.files.model_identity`, ``measured_at`` a date and time in ISO 8601.
    The ``points`` hold for that ``selection`` and ``max_recompute`` alone.
    """

    model: str
    selection: SelectionName
    max_recompute: float
    measured_at: str
    points: tuple[AlphaPoint, ...]

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON data."""
        return {"kind": _KIND, "format": FORMAT, **asdict(self), "points": [asdict(point) for point in self.points]}

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """Return the calibration of a :meth:`to_dict`.

        Raises:
            ConfigError: ``data`` is something else, or of another version.
        """
        match data:
            case {"kind": kind, "format": int(version)} if kind == _KIND and version != FORMAT:
                raise ConfigError(f"its format is {version}, this RAGCache reads format {FORMAT}")
            case {
                "kind": kind,
                "model": str(model),
                "selection": str(selection),
                "max_recompute": float(max_recompute) | int(max_recompute),
                "measured_at": str(measured_at),
                "points": [*points],
            } if kind == _KIND and selection in get_args(SelectionName) and 0 <= max_recompute <= 1:
                try:
                    measured = tuple(AlphaPoint(**point) for point in points)
                except TypeError as error:
                    raise ConfigError(f"one of its points is invalid: {error}") from error
                return cls(model, selection, max_recompute, measured_at, measured)  # type: ignore[arg-type]
        raise ConfigError("the file is not a calibration")


def calibration_path(model: str, selection: SelectionName) -> Path:
    """Return the path of the calibration of ``model``, existing or not."""
    return kept_path("calibrations", model_identity(model), selection)


def find_calibration(model: str, selection: SelectionName) -> Path | None:
    """Return the path of the calibration of ``model``; ``None`` if there is none."""
    path = calibration_path(model, selection)
    return path if path.is_file() else None


def save_calibration(calibration: Calibration, path: Path) -> None:
    """Write ``calibration`` to ``path``, and create its folder. Atomic.

    Raises:
        OSError: the disk is full, or the folder cannot be written to.
    """
    write_json(calibration.to_dict(), path)


def load_calibration(path: Path) -> Calibration:
    """Return the calibration at ``path``.

    Raises:
        ConfigError: the file cannot be read, is damaged, or was written by another version.
    """
    return read_json(path, Calibration.from_dict, "the calibration", "run 'ragcache calibrate' again")
