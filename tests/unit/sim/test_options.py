"""What may be asked of a simulation, and what is refused."""

from __future__ import annotations

import json

import pytest

from ragcache_core.errors import ConfigError
from ragcache_core.sim.options import SIMULATED_POLICIES, SimulationOptions


def test_options_survive_json() -> None:
    options = SimulationOptions(
        policy="lru", settle_shares=(0.5, 0.25), host_tokens=9, frequency="cached", chunk_reuse=0.3
    )
    assert SimulationOptions.from_dict(json.loads(json.dumps(options.to_dict()))) == options


def test_the_defaults_are_those_of_the_command_line() -> None:
    from ragcache_core.cli.commands.simulate import run

    typed = {option.name: option.default for option in run.params}
    for name, value in SimulationOptions().to_dict().items():
        if name == "settle_shares":
            assert typed[name] == "0.25,0.25,0.25,0.25"
        elif name not in ("frequency", "ghost_size", "max_cached_documents", "chunk_reuse"):
            assert typed[name] == value, name


def test_the_command_line_offers_every_policy() -> None:
    from ragcache_core.cli.commands.simulate import run

    policy = next(option for option in run.params if option.name == "policy")
    assert tuple(policy.type.choices) == SIMULATED_POLICIES  # type: ignore[attr-defined]


def test_uses_count_beyond_eviction_except_in_the_papers_policy() -> None:
    assert SimulationOptions(policy="tournament").keeps_frequency
    assert not SimulationOptions(policy="pgdsf").keeps_frequency
    assert SimulationOptions(policy="pgdsf", frequency="ghost").keeps_frequency


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"gpu_tokens": 0}, "gpu_tokens is 0"),
        ({"gpu_tokens": 1.5}, "whole number"),
        ({"host_tokens": -1}, "host_tokens is -1"),
        ({"policy": "magic"}, "tournament, belady, infinite"),
        ({"order": "best"}, "cache_aware"),
        ({"queue": "lifo"}, "fifo, cache-aware"),
        ({"granularity": "token"}, "document, block"),
        ({"frequency": "always"}, "ghost"),
        ({"retrieval_s": float("nan")}, "retrieval_s is nan"),
        ({"retrieval_s": "1"}, "retrieval_s is '1'"),
        ({"max_batch": 0}, "max_batch is 0"),
        ({"settle_shares": (0.8, 0.8)}, "together at most 1"),
        ({"settle_shares": ()}, "a share of 0 or more for each stage"),
        ({"host_tokens": 0, "disk_tokens": 5}, "set host_tokens"),
        ({"policy": "belady", "order": "cache_aware"}, "retrieval or canonical"),
        ({"policy": "belady", "granularity": "block"}, "choose granularity document"),
        ({"max_cached_documents": 2}, "choose granularity block"),
        ({"max_cached_documents": 0, "granularity": "block"}, "max_cached_documents is 0; .* 1 or more"),
    ],
)
def test_what_cannot_work_is_refused(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        SimulationOptions(**settings)  # type: ignore[arg-type]


def test_an_option_that_there_is_not_is_named() -> None:
    with pytest.raises(ConfigError, match="'colour'"):
        SimulationOptions.from_dict({"colour": "red"})
