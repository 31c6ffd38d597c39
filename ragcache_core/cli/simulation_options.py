"""Options of the simulator's settings, for the commands that simulate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from ragcache_core.cli.settings_options import settings_options
from ragcache_core.sim.options import ROUTINGS, SIMULATED_POLICIES, SimulationOptions

_Command = TypeVar("_Command", bound=Callable[..., Any])


def simulation_options(*names: str) -> Callable[[_Command], _Command]:
    """Return a decorator that gives a command the options of settings: of all, unless some are named."""
    return settings_options(
        SimulationOptions,
        *names,
        policy={"type": click.Choice(SIMULATED_POLICIES), "metavar": None},
        cost_model={"metavar": "NAME|FILE"},
        search={"metavar": "FILE"},
        overlaps_transfers={"flag": "--overlap-transfers/--no-overlap-transfers"},
        routing={"type": click.Choice(ROUTINGS), "metavar": None},
    )
