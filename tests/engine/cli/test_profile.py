"""``ragcache profile`` over a real engine."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from ragcache_core.cli import cli
from ragcache_core.client import Engine
from ragcache_core.profiles.files import model_identity
from ragcache_core.profiles.prefill import load_profile

REPEATS = 2


def test_a_profile_of_a_running_engine_is_measured_on_its_own_kv_memory(
    engine: Engine, demo_model: str, tmp_path: Path
) -> None:
    path = tmp_path / "demo.json"
    arguments = ["profile", demo_model, "--url", engine.base_url, "--api-key", engine.api_key, "--json"]
    before = engine.stats()
    result = CliRunner().invoke(
        cli, [*arguments, "--max-tokens", "300", "--repeats", str(REPEATS), "--output", str(path)]
    )
    after = engine.stats()
    assert result.exit_code == 0, result.stderr
    told = json.loads(result.stdout)

    points = [(point["cached_tokens"], point["new_tokens"]) for point in told["points"]]
    assert points == [(0, 32), (0, 64), (0, 128), (0, 300), (128, 32), (128, 64), (128, 128), (256, 32)]
    assert all(len(point["times_s"]) == REPEATS and min(point["times_s"]) > 0 for point in told["points"])
    num_hits = after.num_prefix_hit_tokens - before.num_prefix_hit_tokens
    assert num_hits == REPEATS * sum(cached for cached, _ in points)

    assert told["model"] == model_identity(demo_model)
    assert told["vllm_version"].startswith("0.32")
    model = load_profile(path)
    for point in told["points"]:
        measured = sum(point["times_s"]) / REPEATS  # the median of two
        estimate_s = model.estimate_s(point["cached_tokens"], point["new_tokens"])
        assert abs(estimate_s - measured) < 1e-9
