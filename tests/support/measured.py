"""What was measured of a model before an engine for it is launched: prefill times, and a calibration of chunk reuse."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from ragcache_core.chunk import AlphaPoint
from ragcache_core.policy import PrefillCostModel
from ragcache_core.profiles.calibration import Calibration, calibration_path, save_calibration
from ragcache_core.profiles.prefill import Profile, profile_path, save_profile

_AT = "2026-01-01T00:00:00"


@contextmanager
def measured(model: Path, folder: Path, points: Sequence[AlphaPoint] = ()) -> Iterator[None]:
    """Inside, launches for ``model`` take default times for measured ones, and ``points`` for calibrated ones.

    They are kept in ``folder``, which outlives the engine.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("platformdirs.user_data_dir", lambda name: str(folder / name))
        times = PrefillCostModel.default()
        save_profile(Profile(model.name, "any", _AT, "0.32.0", "float32", 1, 0.0, times), profile_path(str(model)))
        if points:
            calibration = Calibration(model.name, "whole_chunks", 1.0, _AT, tuple(points))
            save_calibration(calibration, calibration_path(str(model), "whole_chunks"))
        yield
