"""``ragcache stats``: what a running server says about its cache, once or again and again."""

from __future__ import annotations

import os
import sys
import time
from datetime import datetime
from typing import TYPE_CHECKING, NoReturn, Self

import click

from ragcache_core.cli.command import Command, print_json
from ragcache_core.cli.options import FiniteRange, api_key_option
from ragcache_core.cli.reading import TEXT, Interval, TerminalSize, reading_view, watched_view
from ragcache_core.errors import EngineDiedError, EngineTimeoutError, EngineUnreachableError
from ragcache_core.runtime.terminal import plain
from ragcache_core.stats import EngineStats

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ragcache_core.client import Engine

_WATCH_S = 2.0
_MIN_WATCH_S = 0.1


@click.command(
    cls=Command,
    short_help="Print a server's counters, once or again and again.",
    examples=[
        "ragcache stats --url http://127.0.0.1:8000 --api-key KEY",
        "ragcache stats --url http://127.0.0.1:8000 --watch",
        "ragcache stats --url http://127.0.0.1:8000 --watch --every 10 --json",
    ],
)
@click.option("--url", required=True, metavar="URL", help="The server's address, as 'ragcache serve' prints it.")
@api_key_option
@click.option("--watch", is_flag=True, help="Read again and again, until Ctrl-C.")
@click.option(
    "--every",
    "every_s",
    type=FiniteRange(min=_MIN_WATCH_S),
    metavar="SECONDS",
    help=f"How long --watch pauses between two readings. [default: {_WATCH_S:g}]",
)
def stats(url: str, api_key: str | None, watch: bool, every_s: float | None, as_json: bool) -> None:
    """Print the counters of the server at URL since it started: hit rates, tiers, hottest documents.

    With --watch they fill a terminal, drawn again and again beside rates since the last reading; a server that is
    started again meanwhile is waited for. Into a file or a pipe they go as plain text, one after the other; with --json
    each reading is one line, and a server that goes away ends the watch. Ctrl-C ends it with exit status 0.
    """
    from ragcache_core.client import Engine

    if every_s is not None and not watch:
        raise click.UsageError("--every is the pause between readings of --watch: give --watch as well.")
    try:
        with Engine.connect(url, api_key=api_key, tokenizer=False) as engine:
            if watch:
                _watch(engine, every_s or _WATCH_S, as_json=as_json)
            reading = engine.stats()
            if as_json:
                _print_json(engine, reading, None)
            else:
                _print_once(engine, reading)
    except KeyboardInterrupt:
        if not watch:
            raise
        click.echo("ragcache: stopping", err=True)  # the way to end a watch: no error


def _print_once(engine: Engine, reading: EngineStats) -> None:
    if not sys.stdout.isatty():
        click.echo(plain(reading_view(engine.model, engine.base_url, _now(), reading, TEXT)))
        return
    from rich.console import Console

    console = Console()
    console.print(reading_view(engine.model, engine.base_url, _now(), reading, TerminalSize(*console.size)))


def _watch(engine: Engine, every_s: float, *, as_json: bool) -> NoReturn:
    """Return never: show readings until Ctrl-C. A server that goes away is waited for, but with ``as_json``.

    Raises:
        EngineUnreachableError: it went away, or was never there.
    """
    num_readings, before, read_s = 0, None, 0.0
    with _Screen() if _draws() and not as_json else _Lines(as_json) as shown:
        while True:
            try:
                reading = engine.stats()
            except (EngineUnreachableError, EngineDiedError, EngineTimeoutError) as error:
                if not num_readings:
                    raise
                if as_json:
                    raise EngineUnreachableError(
                        f"the server at {engine.base_url} went away after reading {num_readings}: start it again with "
                        f"'ragcache serve', then watch it again ({error})"
                    ) from error
                before = None  # a server that was away may have reset its counters
                shown.miss(engine)
            else:
                last_s, read_s = read_s, time.monotonic()
                shown.show(
                    engine, reading, None if before is None else Interval(reading.since(before), read_s - last_s)
                )
                num_readings, before = num_readings + 1, reading
            time.sleep(every_s)


class _Lines:
    """Prints each reading below the one before: as text, or as a line of JSON."""

    def __init__(self, as_json: bool) -> None:
        self._as_json, self._is_away = as_json, False

    def __enter__(self) -> Self:
        return self

    def show(self, engine: Engine, reading: EngineStats, last: Interval | None) -> None:
        self._is_away = False
        if self._as_json:
            _print_json(engine, reading, last)
        else:
            click.echo(plain(watched_view(engine.model, engine.base_url, _now(), reading, last, TEXT)) + "\n")

    def miss(self, engine: Engine) -> None:
        if not self._is_away:
            click.echo(f"ragcache: {_away(engine)}", err=True)
        self._is_away = True

    def __exit__(self, *_: object) -> None:
        pass


class _Screen:
    """Draws each reading over the one before, on the whole terminal; the last one is printed in the end."""

    def __enter__(self) -> Self:
        from rich.console import Console
        from rich.live import Live

        self._console = Console()
        self._reading: RenderableType = ""
        self._live = Live(console=self._console, screen=True, auto_refresh=False)
        self._live.start()
        return self

    def show(self, engine: Engine, reading: EngineStats, last: Interval | None) -> None:
        room = TerminalSize(*self._console.size)
        self._reading = watched_view(engine.model, engine.base_url, _now(), reading, last, room)
        self._live.update(self._reading, refresh=True)

    def miss(self, engine: Engine) -> None:
        from rich.console import Group
        from rich.text import Text

        self._live.update(Group(Text(f"{_now():%H:%M:%S}  {_away(engine)}", "bold"), self._reading), refresh=True)

    def __exit__(self, *_: object) -> None:
        self._live.stop()
        self._console.print(self._reading)


def _draws() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def _away(engine: Engine) -> str:
    return f"the server at {engine.base_url} went away and is waited for; this is what it last said"


def _print_json(engine: Engine, reading: EngineStats, last: Interval | None) -> None:
    facts = {"time": _now().isoformat(timespec="seconds"), "url": engine.base_url, "model": engine.model}
    interval = {} if last is None else {"interval": last.to_dict()}
    print_json({**facts, **reading.to_dict(), **interval})


def _now() -> datetime:
    return datetime.now().astimezone()
