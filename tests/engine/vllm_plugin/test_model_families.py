"""Models of many families: over all tiers and a restart, answers are those of vLLM without a cache, token for token."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.conftest import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # engines one after the other, three for each family

GROUPS = {
    "gemma3": {"SlidingWindowSpec": 5, "FullAttentionSpec": 1},
    "gpt_oss": {"SlidingWindowSpec": 1, "FullAttentionSpec": 1},
    "llama4": {"ChunkedLocalAttentionSpec": 3, "FullAttentionSpec": 1},
    "qwen3_moe": {"FullAttentionSpec": 1},
}
"""The groups of KV caches that vLLM finds in each; the KV of the last one has 8 bits, where the CPU can."""


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What ``family_facts`` says of each family."""
    module, folder = "tests.engine.vllm_plugin.family_facts", tmp_path_factory.mktemp("families")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, str(folder), *GROUPS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts


@pytest.mark.parametrize("family", GROUPS)
def test_answers_are_those_of_vllm_without_a_cache(families: dict[str, Any], family: str) -> None:
    facts = families[family]
    assert facts["groups"] == GROUPS[family], "this tests another kind of model than it says"
    assert facts["kv dtypes"] == ["torch.uint8" if facts["kv cache dtype"] == "fp8" else "torch.float32"]
    assert facts["distinct tokens"] > 20, "answers that are all equal cannot differ"
    for start in (facts["first"], facts["second"]):
        assert start["different"] == 0
        assert start["worst"] < 1e-3
        assert start["tokens"]["gpu"] > 0
        assert {tier["name"]: tier["is_enabled"] for tier in start["tiers"]} == {
            "gpu": True,
            "host": True,
            "disk": True,
        }
        assert min(tier["num_blocks"] for tier in start["tiers"]) > 0
    assert facts["first"]["evicted"]["gpu"] > 0
    assert facts["first"]["tokens"]["host"] + facts["second"]["tokens"]["host"] > 0
    assert facts["second"]["tokens"]["disk"] > 0, "the next engine finds what this one left on the disk"


def test_some_requests_are_preempted(families: dict[str, Any]) -> None:
    """In which families depends on the machine's speed."""
    starts = [facts[start] for facts in families.values() for start in ("first", "second")]
    assert sum(start["preempted"] for start in starts) > 0
