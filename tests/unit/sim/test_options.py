"""What may be asked of a simulation, and what is refused."""

from __future__ import annotations

import pytest

from ragcache_core.errors import ConfigError
from ragcache_core.sim.options import SimulationOptions


def test_the_command_line_has_every_option_with_its_default() -> None:
    from ragcache_core.cli.commands.simulate import run

    options = run.make_context("simulate", ["trace.jsonl"]).params
    assert SimulationOptions(**{name: options[name] for name in SimulationOptions().to_dict()}) == SimulationOptions()


def test_uses_count_beyond_eviction_except_in_the_papers_policy() -> None:
    assert SimulationOptions(policy="mixture").keeps_frequency
    assert not SimulationOptions(policy="pgdsf").keeps_frequency


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"gpu_tokens": 0}, "gpu_tokens"),
        ({"gpu_tokens": 1.5}, "gpu_tokens"),
        ({"policy": "magic"}, "policy"),
        ({"retrieval_s": float("nan")}, "retrieval_s"),
        ({"retain_s": -1.0}, "retain_s"),
        ({"retained_share": 1.5}, "retained_share"),
        ({"settle_shares": (0.8, 0.8)}, "settle_shares"),
        ({"settle_shares": ()}, "settle_shares"),
        ({"host_tokens": 0, "disk_tokens": 5}, "disk_tokens"),
        ({"max_cached_documents": 0}, "max_cached_documents"),
        ({"chunk_reuse": 1.5}, "chunk_reuse"),
        ({"chunk_reuse": 0.3, "chunk_share": -0.1}, "chunk_share"),
        ({"chunk_reuse": 0.3, "host_tokens": 1}, "chunk_reuse"),
        ({"replicas": 1_025}, "replicas"),
        ({"replicas": 2, "speculation": "dynamic"}, "speculation"),
        ({"routing": "magic"}, "routing"),
        ({"policy": "belady", "order": "cache_aware"}, "policy belady"),
        ({"policy": "belady", "replicas": 2}, "policy belady"),
        ({"policy": "belady", "chunk_reuse": 0.3}, "policy belady"),
    ],
)
def test_what_cannot_work_is_refused_by_its_name(settings: dict[str, object], name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name} "):
        SimulationOptions(**settings)  # type: ignore[arg-type]
