"""``python kernels/gpu_check.py``: skips without a GPU, says what it found, and writes what the simulator reads."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ragcache_core.cli import cli
from ragcache_core.policy import PrefillCostModel
from ragcache_core.sim.testbeds import load_testbed

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
CHECK = str(ROOT / "kernels" / "gpu_check.py")
ALLOWED = {"numpy", "torch", "triton", "tqdm", "ragcache_kernels", "benchmarks"} | sys.stdlib_module_names


def _run(*arguments: str, python: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *python, CHECK, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="there is a GPU here")
def test_without_a_gpu_it_skips_with_one_line_and_writes_nothing(tmp_path: Path) -> None:
    done = _run("--output", str(tmp_path / "found.json"), "--cost-model", str(tmp_path / "cost.json"))
    assert (done.returncode, done.stdout) == (0, "gpu-check: skipped: torch finds no GPU on this machine\n")
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What the whole check prints and the folder to which it wrote, in the interpreter at toy sizes."""
    folder = tmp_path_factory.mktemp("check")
    done = _run(
        "--interpret", "--sweep", "--output", str(folder / "all.json"), "--cost-model", str(folder / "cost.json")
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, folder


def test_every_kernel_is_checked_and_timed(interpreted: tuple[str, Path]) -> None:
    _, folder = interpreted
    found = json.loads((folder / "all.json").read_text(encoding="utf-8"), parse_constant=pytest.fail)
    kernels = {"rotate_into_cache", "unrotate_from_cache", "chunk_attention_mass", "scattered_attention"}
    assert {one["operation"] for one in found["agreements"] if one["is_met"]} == kernels
    assert {one["operation"] for one in found["speeds"] if one["seconds"] > 0 and one["num_bytes"] > 0} == kernels
    assert all(one["twin_s"] > 0 for one in found["speeds"] if not one["link_bytes"])
    assert set(found["ceilings"]) == {
        *("copy_bytes_per_s", "matmul_flop_per_s", "host_to_device_bytes_per_s", "device_to_host_bytes_per_s"),
    }
    assert len(found["tiles"]) == 2
    assert found["not_measured"] == ["not in the interpreter"]


def test_the_simulator_runs_with_what_it_wrote(interpreted: tuple[str, Path], tmp_path: Path) -> None:
    _, folder = interpreted
    cost = folder / "cost.json"
    written = json.loads(cost.read_text(encoding="utf-8"))
    testbed = load_testbed(str(cost))
    assert isinstance(testbed.cost, PrefillCostModel)
    assert testbed.cost.estimate_s(8, 4) == pytest.approx(written["cost_model"]["seconds"][1][1])
    trace = tmp_path / "trace.jsonl"
    line: dict[str, Any] = {"docs": ["a", "b"], "doc_tokens": [5, 7], "question_tokens": 3, "output_tokens": 1}
    trace.write_text("".join(json.dumps({"t": float(t), **line}) + "\n" for t in range(3)), encoding="utf-8")
    result = CliRunner().invoke(cli, ["simulate", str(trace), "--cost-model", str(cost)])
    assert result.exit_code == 0, result.output
    assert str(cost) in result.output


def test_the_kernels_need_torch_triton_and_numpy_alone() -> None:
    for path in (*(ROOT / "kernels").rglob("*.py"), *(ROOT / "benchmarks" / "kernels").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert {name.partition(".")[0] for name in names} <= ALLOWED, path
