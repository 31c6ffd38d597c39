"""Command-line options of the simulator's settings: names and defaults are those of ``SimulationOptions``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar, get_args

import click

from ragcache_core.ordering import DOCUMENT_ORDERS
from ragcache_core.sim.options import ROUTINGS, SIMULATED_POLICIES, Queue, SimulationOptions, Speculation

_Command = TypeVar("_Command", bound=Callable[..., Any])
_TESTBEDS = "a10g-mistral-7b, a10g-llama2-7b, h800-mixtral-8x7b, h800-llama2-70b, h100-llama3-8b"


class ShareList(click.ParamType[Any]):
    """Numbers with commas between them."""

    name = "shares"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        """Return the numbers."""
        if isinstance(value, tuple):
            return value
        try:
            return tuple(float(share) for share in value.split(","))
        except ValueError:
            self.fail(f"{value!r} are no shares: give one for each stage, as 0.3,0.3,0.2,0.2.", param, ctx)


class _Setting(NamedTuple):
    kind: Any
    metavar: str | None
    help: str


_SETTINGS: Mapping[str, _Setting] = {
    "policy": _Setting(
        click.Choice(SIMULATED_POLICIES),
        None,
        "What a full tier evicts; belady knows the future, and infinite evicts nothing.",
    ),
    "order": _Setting(click.Choice(DOCUMENT_ORDERS), None, "In which order a prompt shows its documents."),
    "gpu_tokens": _Setting(int, "N", "KV on the GPU."),
    "host_tokens": _Setting(int, "N", "KV in host memory."),
    "disk_tokens": _Setting(int, "N", "KV on disk."),
    "system_tokens": _Setting(int, "N", "Of the prompt that all requests share."),
    "cost_model": _Setting(
        str, "NAME|FILE", f"What a prefill costs: {_TESTBEDS}, or a file of 'ragcache profile --output'."
    ),
    "queue": _Setting(click.Choice(get_args(Queue)), None, "The order of waiting requests."),
    "window": _Setting(int, "N", "How often a request may be overtaken."),
    "block_size": _Setting(int, "N", "Tokens in a block."),
    "retrieval_s": _Setting(float, "S", "How long a search takes."),
    "search": _Setting(
        str,
        "FILE",
        'Measured searches; each request draws one instead of --retrieval-s: {"search_s": [0.12, 0.31]}.',
    ),
    "max_batch": _Setting(int, "N", "Requests that run at a time."),
    "max_cached_documents": _Setting(
        int, "N", "Keep the first N documents of a prompt, as the engine's option does. [default: all]"
    ),
    "overlaps_transfers": _Setting(bool, None, "Load KV layer by layer, while earlier layers are computed."),
    "speculation": _Setting(
        click.Choice(get_args(Speculation)), None, "Prefill a search's candidates before it has ended."
    ),
    "settle_shares": _Setting(
        ShareList(), "P,P,...", "Searches whose candidates are the final ones from each stage on."
    ),
    "chunk_reuse": _Setting(
        float,
        "FRACTION",
        "Reuse documents at any position and recompute this fraction of them: approximate. [default: off]",
    ),
    "chunk_share": _Setting(float, "SHARE", "Of host and disk, for documents that are reused so."),
    "replicas": _Setting(int, "N", "Engines, each with tiers of these sizes."),
    "routing": _Setting(
        click.Choice(ROUTINGS),
        None,
        "Which replica gets a request: each in turn, or, with the order of its documents, the choice of a Fleet.",
    ),
    "warm_up": _Setting(int, "N", "Requests at the start that do not count."),
    "seed": _Setting(int, "N", "Of random draws."),
}


def simulation_options(*names: str) -> Callable[[_Command], _Command]:
    """Return a decorator that gives a command the options of settings: of all, unless some are named."""

    def decorate(command: _Command) -> _Command:
        defaults = SimulationOptions().to_dict()
        for name in reversed(names or tuple(_SETTINGS)):
            kind, metavar, text = _SETTINGS[name]
            default = defaults[name]
            flag = "--" + name.replace("_", "-")
            if isinstance(kind, ShareList):
                default = ",".join(map(str, SimulationOptions().settle_shares))
            if kind is bool:
                flag = "--overlap-transfers/--no-overlap-transfers"
            command = click.option(
                flag, name, type=kind, default=default, show_default=default is not None, metavar=metavar, help=text
            )(command)
        return command

    return decorate
