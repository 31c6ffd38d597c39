"""The files of tests on engines that are named because they take long are there."""

from __future__ import annotations

from tests.conftest import ROOT
from tests.engine.conftest import LONGEST_FIRST


def test_files_that_run_first_are_there() -> None:
    assert [name for name in LONGEST_FIRST if not (ROOT / "tests" / "engine" / name).is_file()] == []
