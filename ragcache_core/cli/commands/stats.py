"""``ragcache stats``: what a running server says about its cache, once or again and again."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import TYPE_CHECKING, NoReturn

import click

from ragcache_core.cli.command import Command, print_json
from ragcache_core.cli.options import FiniteRange, api_key_option
from ragcache_core.cli.reading import Interval, lines_of, watched_lines
from ragcache_core.errors import EngineDiedError, EngineTimeoutError, EngineUnreachableError
from ragcache_core.stats import EngineStats

if TYPE_CHECKING:
    from ragcache_core.client import Engine

_WATCH_S = 2.0
_MIN_WATCH_S = 0.1

_Show = Callable[["Engine", EngineStats, Interval | None], None]
"""Shows a reading of an engine, and what was counted since the one before."""


@click.command(
    cls=Command,
    short_help="Print a server's counters, once or again and again.",
    examples=[
        "ragcache stats --url http://127.0.0.1:8000 --api-key KEY",
        "ragcache stats --url http://127.0.0.1:8000 --watch",
        "ragcache stats --url http://127.0.0.1:8000 --watch 10 --json",
    ],
)
@click.option("--url", required=True, metavar="URL", help="The server's address, as 'ragcache serve' prints it.")
@api_key_option
@click.option(
    "--watch",
    "watch_s",
    type=FiniteRange(min=_MIN_WATCH_S),
    is_flag=False,
    flag_value=_WATCH_S,
    metavar="[SECONDS]",
    help=f"Read again every so many seconds, until Ctrl-C. [without a number: {_WATCH_S:g}]",
)
def stats(url: str, api_key: str | None, watch_s: float | None, as_json: bool) -> None:
    """Print the counters of the server at URL since it started: hit rates, tiers, hottest documents.

    With --watch they are drawn again in place on a terminal, beside rates since the last reading; with --json each
    reading is one line. Ctrl-C ends the watch with exit status 0.
    """
    from ragcache_core.client import Engine

    try:
        with Engine.connect(url, api_key=api_key, tokenizer=False) as engine:
            if watch_s is not None:
                _watch(engine, watch_s, _show_json if as_json else _Redrawn() if sys.stdout.isatty() else _show_apart)
            reading = engine.stats()
            if as_json:
                _show_json(engine, reading, None)
                return
            click.echo(f"{'server':<16} {engine.base_url}, {_now():%Y-%m-%d %H:%M:%S}")
            click.echo("\n".join(lines_of(engine.model, reading)))
    except KeyboardInterrupt:
        if watch_s is None:
            raise
        click.echo("ragcache: stopping", err=True)  # the way to end a watch: no error


def _watch(engine: Engine, watch_s: float, show: _Show) -> NoReturn:
    """Return never: show readings until the server is gone."""
    num_readings, before, read_s = 0, None, 0.0
    while True:
        try:
            reading = engine.stats()
        except (EngineUnreachableError, EngineDiedError, EngineTimeoutError) as error:
            if not num_readings:
                raise
            raise EngineUnreachableError(
                f"the server at {engine.base_url} went away after reading {num_readings}: start it again with "
                f"'ragcache serve', then watch it again ({error})"
            ) from error
        last_s, read_s = read_s, time.monotonic()
        show(engine, reading, None if before is None else Interval(reading.since(before), read_s - last_s))
        num_readings, before = num_readings + 1, reading
        time.sleep(watch_s)


def _watched_lines(engine: Engine, reading: EngineStats, last: Interval | None) -> Iterator[str]:
    return watched_lines(engine.model, engine.base_url, _now(), reading, last)


def _show_apart(engine: Engine, reading: EngineStats, last: Interval | None) -> None:
    click.echo("\n".join(_watched_lines(engine, reading, last)) + "\n")


def _show_json(engine: Engine, reading: EngineStats, last: Interval | None) -> None:
    facts = {"time": _now().isoformat(timespec="seconds"), "url": engine.base_url, "model": engine.model}
    interval = {} if last is None else {"interval": last.to_dict()}
    print_json({**facts, **reading.to_dict(), **interval})


def _now() -> datetime:
    return datetime.now().astimezone()


class _Redrawn:
    """Draws each reading over the one before; what does not fit the terminal is left out."""

    def __init__(self) -> None:
        self._num_lines = 0

    def __call__(self, engine: Engine, reading: EngineStats, last: Interval | None) -> None:
        size = shutil.get_terminal_size()
        lines = [line[: size.columns - 1] for line in _watched_lines(engine, reading, last)][: size.lines - 1]
        over_the_last = f"\x1b[{self._num_lines}A\x1b[J" if self._num_lines else ""
        click.echo(over_the_last + "\n".join(lines))
        self._num_lines = len(lines)
