"""``make gpu-check`` on a machine that has vLLM and little else."""

from __future__ import annotations

import subprocess
import sys


def test_frameworks_and_faiss_are_loaded_for_speculation_alone() -> None:
    missing = "import sys; sys.modules.update(dict.fromkeys(('llama_index', 'langchain_core', 'faiss')))"
    ended = subprocess.run(
        [sys.executable, "-c", f"{missing}; from tests.benchmarks.device.__main__ import PARTS; print(*PARTS)"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["kernels", "tiers", "tiers-bf16", "speculation", "chunks", "copies", "steps"]
