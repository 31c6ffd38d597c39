"""The ``ragcache`` command: its version, its help, its commands."""

from __future__ import annotations

from typing import NoReturn

import click

from ragcache_core._version import __version__
from ragcache_core.cli.command import Group
from ragcache_core.cli.commands.advise import advise
from ragcache_core.cli.commands.ask import ask
from ragcache_core.cli.commands.batch import batch
from ragcache_core.cli.commands.bench import bench
from ragcache_core.cli.commands.cache import cache
from ragcache_core.cli.commands.calibrate import calibrate
from ragcache_core.cli.commands.compile import compile_
from ragcache_core.cli.commands.forget import forget
from ragcache_core.cli.commands.index import index
from ragcache_core.cli.commands.profile import profile
from ragcache_core.cli.commands.quality import quality
from ragcache_core.cli.commands.serve import serve
from ragcache_core.cli.commands.simulate import simulate
from ragcache_core.cli.commands.stats import stats
from ragcache_core.cli.commands.store import store
from ragcache_core.cli.commands.trace import trace
from ragcache_core.cli.commands.warm import warm


@click.group(
    cls=Group,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit status: 0 done, 1 error, 2 wrong usage, 130 interrupted, 143 terminated.",
)
@click.version_option(__version__, prog_name="ragcache")
def cli() -> None:
    """Serve models with a KV cache of documents, and answer questions from your documents.

    Index a directory once, then ask; or serve a model to any OpenAI client. A document that was in an earlier prompt
    is in the engine's cache: the next answer that needs it starts sooner.
    """


for command in (
    *(index, ask, batch, store, serve, stats, cache, forget, warm, compile_),
    *(profile, quality, calibrate, trace, simulate, advise, bench),
):
    cli.add_command(command)


def main() -> NoReturn:
    """Run the command line and exit: the ``ragcache`` entry point."""
    cli.main(prog_name="ragcache")
