"""What the build of images rejects before it builds."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.deployment.image import main

DIGEST = "sha256:" + "0" * 64
PINNED = ["--cpu-base", f"registry.example/python:3.11@{DIGEST}", "--cuda-base", f"registry.example/vllm@{DIGEST}"]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--release", *PINNED[:2]], "Dockerfile: the base "),
        (["--release", *PINNED[2:]], "Dockerfile.cpu: the base "),
        (["--release", *PINNED[:3], "registry.example/vllm@sha256:1234"], "vllm@sha256:..."),
        (["--push", "registry.example/owner"], "give --release as well"),
    ],
    ids=["cuda", "cpu", "short", "push"],
)
def test_a_release_needs_the_digest_of_each_base_and_nothing_else_is_pushed(
    options: list[str], why: str, tmp_path: Path
) -> None:
    done = CliRunner().invoke(main, ["--folder", str(tmp_path / "images"), *options])
    assert done.exit_code == 1
    (error,) = (line for line in done.output.splitlines() if line.startswith("ragcache: error: "))
    assert why in error
    assert not (tmp_path / "images").exists(), "nothing was built"
