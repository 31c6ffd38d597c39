"""``ragcache stats``: the cache statistics of a running server, once or repeatedly."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, NoReturn, Self

import click

from ragcache_core.cli.command import Command, print_json
from ragcache_core.cli.options import FiniteRange, api_key_option, join_server
from ragcache_core.cli.output import printable, size
from ragcache_core.errors import EngineDiedError, EngineTimeoutError, EngineUnreachableError
from ragcache_core.runtime.terminal import columns, plain
from ragcache_core.stats import DocumentUse, EngineStats, TierStats

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ragcache_core.client import Engine


_BAR_CELLS = 20
_DOC_ID_CHARS = 40


@dataclass(frozen=True, slots=True)
class TerminalSize:
    """Size of a terminal in characters and lines, to which output is fitted."""

    width: int
    height: int

    @property
    def has_bars(self) -> bool:
        return self.width >= 90

    @property
    def has_sizes(self) -> bool:
        return self.width >= 62

    @property
    def has_gaps(self) -> bool:
        return self.height >= 30


TEXT = TerminalSize(80, 0)
"""Of a file or a pipe: no bars, and no empty lines but between readings."""


def reading_view(model: str, address: str, now: datetime, reading: EngineStats, room: TerminalSize) -> RenderableType:
    """Return the counters, a table of the tiers, and the hottest documents."""
    from rich.console import Group

    counters = (("server", f"{address}, {now:%Y-%m-%d %H:%M:%S}"), *_counters(model, reading))
    parts: list[RenderableType] = _named(counters)
    if reading.policy is None:
        parts.append(_line("plain vLLM: it runs without RAGCache ('ragcache serve' without --no-cache runs it with)"))
        return Group(*parts)
    if reading.tiers:
        parts += ["", _tiers(reading, room)]
    if reading.hottest_documents:
        parts += ["", _documents(reading.hottest_documents)]
    return Group(*parts)


def watched_view(
    model: str, address: str, now: datetime, reading: EngineStats, last: Interval | None, room: TerminalSize
) -> RenderableType:
    """Return a reading with the counts since the previous one; the main part fits 64 x 16 characters."""
    from rich.console import Group

    kind = "plain vLLM, without RAGCache" if reading.policy is None else f"policy {reading.policy}"
    load = f"{reading.num_running:,} running, {reading.num_waiting:,} waiting, KV {reading.kv_cache_usage:.0%} full"
    seconds = "last reading" if last is None else f"last {last.seconds:.1f} s"
    gap: list[RenderableType] = [""] if room.has_gaps else []
    parts = [_line(f"{now:%H:%M:%S}  {address}"), _line(f"{load}; {kind}; {_printable(model)}"), *gap]
    parts.append(columns(_rates(reading, last), "<>>", ("", seconds, "since start")))
    if reading.tiers:
        parts += [*gap, _watched_tiers(reading, last, room)]
    if reading.hottest_documents and room.has_gaps:
        parts += [*gap, _documents(reading.hottest_documents)]
    elif reading.hottest_documents:
        hottest = ", ".join(_printable(document.name) for document in reading.hottest_documents)
        parts.append(_line(f"hottest: {hottest}"))
    if reading.policy is not None:
        parts += [*gap, *_named(_cache_counters(reading))]
    return Group(*parts)


def _watched_tiers(reading: EngineStats, last: Interval | None, room: TerminalSize) -> RenderableType:
    counted = {} if last is None else {tier.name: tier for tier in last.counted.tiers}
    rows: list[list[RenderableType]] = []
    for tier in reading.tiers:
        evicted, hits = "-", "-"
        if last is not None and tier.name in counted:
            evicted = f"{counted[tier.name].num_evicted_blocks / last.seconds:.3g}"
            hits = f"{last.counted.tier_hit_rate(counted[tier.name]):.1%}"
        used = _in_use(tier)
        full = _full(tier) if tier.is_enabled else "off"
        hit_rate = f"{reading.tier_hit_rate(tier):.1%}"
        sizes = [used] if room.has_sizes else []
        rows.append([tier.name, *sizes, *([_bar(tier)] if room.has_bars else []), full, evicted, hits, hit_rate])
    shown = ["in use"] * room.has_sizes + [""] * room.has_bars
    return columns(rows, "<" * (1 + len(shown)) + ">>>>", ("tier", *shown, "full", "evicted/s", "hits now", "hits"))


def _rates(reading: EngineStats, last: Interval | None) -> Iterator[Sequence[str]]:
    counted, seconds = (None, 1.0) if last is None else (last.counted, last.seconds)
    for name, field in (
        ("answers begun", "num_first_tokens"),
        ("prompt tokens", "num_prompt_tokens"),
        ("output tokens", "num_output_tokens"),
    ):
        rate = "-" if counted is None else f"{_rate(getattr(counted, field) / seconds)}/s"
        yield name, rate, f"{getattr(reading, field):,}"
    yield "TTFT, mean", _milliseconds(counted), _milliseconds(reading)
    shares = (
        "-" if of is None or not of.num_prefix_query_tokens else f"{of.cached_share:.1%}" for of in (counted, reading)
    )
    yield "hit in any tier", *shares
    if reading.policy is not None:
        confirmed = (
            "-" if of is None else f"{of.num_confirmed_speculations:,} of {of.num_speculative_requests:,}"
            for of in (counted, reading)
        )
        yield "speculations", *confirmed


@dataclass(frozen=True, slots=True)
class Interval:
    """The counts between two readings, ``seconds`` apart."""

    counted: EngineStats
    seconds: float

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON data."""
        return {
            "seconds": self.seconds,
            "first_tokens_per_s": self.counted.num_first_tokens / self.seconds,
            "prompt_tokens_per_s": self.counted.num_prompt_tokens / self.seconds,
            "output_tokens_per_s": self.counted.num_output_tokens / self.seconds,
            "mean_ttft_s": self.counted.mean_ttft_s,
            "cached_share": self.counted.cached_share,
        }


def _rate(per_s: float) -> str:
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"


def _milliseconds(of: EngineStats | None) -> str:
    return "-" if of is None or of.mean_ttft_s is None else f"{1000 * of.mean_ttft_s:,.1f} ms"


def _counters(model: str, reading: EngineStats) -> Iterator[tuple[str, str]]:
    yield "model", model
    yield "requests", f"{reading.num_running} running, {reading.num_waiting} waiting"
    yield "running requests hold", f"{reading.kv_cache_usage:.1%} of the GPU KV cache"
    yield "prompt tokens", f"{reading.num_prompt_tokens:,}"
    yield "output tokens", f"{reading.num_output_tokens:,}"
    yield (
        "found in cache",
        f"{reading.num_prefix_hit_tokens:,} of {reading.num_prefix_query_tokens:,} tokens "
        f"({reading.prefix_hit_rate:.1%})",
    )
    yield "TTFT, mean", f"{_milliseconds(reading)} of {reading.num_first_tokens:,} answers"
    yield "preemptions", f"{reading.num_preemptions:,}"
    yield from _cache_counters(reading)


def _cache_counters(reading: EngineStats) -> Iterator[tuple[str, str]]:
    if reading.policy is not None:
        yield "policy", reading.policy
        yield "ignored", f"metadata of {reading.num_ignored_metadata:,} requests"
        shared = next((tier for tier in reading.tiers if tier.name == "shared"), None)
        num_corrupt, num_dropped = reading.num_corrupt_blocks, reading.num_dropped_blocks
        if shared is not None:
            num_corrupt, num_dropped = num_corrupt - shared.num_corrupt_blocks, num_dropped - shared.num_dropped_blocks
        yield "disk blocks", f"{num_corrupt:,} corrupt, {reading.num_lost_blocks:,} lost, {num_dropped:,} dropped"
        overtaken = f"a waiting one overtaken {reading.max_overtaken:,} times at most"
        if shared is not None:
            counts = f"{shared.num_corrupt_blocks:,} corrupt, {shared.num_dropped_blocks:,} dropped"
            yield "shared store", f"failed or did not answer {reading.num_shared_failures:,} times; blocks: {counts}"
        yield "queue", f"{reading.num_reordered_requests:,} requests served early, {overtaken}"
        changed = f"changed in {reading.num_reordered_prompts:,} of {reading.num_requests:,} prompts"
        yield "document order", f"{changed} ({reading.reordered_share:.1%})"
        yield "conversations", f"{reading.num_followup_turns:,} of {reading.num_requests:,} prompts continue one"
        confirmed = f"{reading.num_confirmed_speculations:,} of {reading.num_speculative_requests:,} requests confirmed"
        wasted = f"{reading.num_wasted_tokens:,} of {reading.num_speculative_tokens:,} tokens wasted"
        yield "speculation", f"{confirmed}, {wasted}"
    if (chunks := reading.chunks) is not None:
        reused = f"{chunks.num_reused_chunks:,} chunks of {chunks.num_requests:,} requests"
        tokens = f"{chunks.num_reused_tokens:,} tokens reused, {chunks.num_recomputed_tokens:,} recomputed"
        tokens += f", {chunks.num_prefix_tokens:,} in approximate prefixes"
        yield "chunk reuse", f"{reused}: {tokens}; {chunks.num_refused_requests:,} requests answered exactly"
        stored = f"{chunks.num_chunks:,} chunks, {chunks.num_variants:,} versions"
        host = f"{chunks.used_tokens:,} of {chunks.capacity_tokens:,} tokens in host memory"
        disk = f"{chunks.used_disk_tokens:,} of {chunks.disk_capacity_tokens:,} on disk"
        switched_off = (
            "" if chunks.is_disk_enabled or not chunks.disk_capacity_tokens else " (switched off: see the log)"
        )
        yield "stored chunks", f"{stored}; {host}, {disk}{switched_off}"
        unusable = f"{chunks.num_mismatched_chunks:,} mismatched, {chunks.num_too_long_chunks:,} too long"
        gone = f"{chunks.num_capacity_misses:,} without free space, {chunks.num_evicted_chunks:,} evicted"
        damaged = f"{chunks.num_corrupt_chunks:,} corrupt, {chunks.num_lost_chunks:,} lost"
        for kind in chunks.kinds:
            counts = f"{kind.num_errors:,} of {kind.num_audits:,} audited answers differed"
            in_use = (
                "stopped" if kind.is_stopped else f"alpha {kind.alpha:g}, error rate at most {kind.error_bound:.1%}"
            )
            share = f"{kind.num_approximate:,} of {kind.num_answers:,} answers approximate"
            yield f"kind {kind.kind}", f"{share}, {counts}; {in_use}"
        yield "unused chunks", f"{unusable}, {gone}, {damaged}, {chunks.num_dropped_chunks:,} dropped"


def _tiers(reading: EngineStats, room: TerminalSize) -> RenderableType:
    rows = (
        (
            tier.name,
            _in_use(tier),
            *([_bar(tier)] if room.has_bars else []),
            _full(tier) if tier.is_enabled else "switched off: see the log",
            f"{tier.num_blocks:,}",
            f"{tier.num_evicted_blocks:,}",
            f"{tier.num_hit_tokens:,}",
            f"{reading.tier_hit_rate(tier):.1%}",
        )
        for tier in reading.tiers
    )
    bar = [""] * room.has_bars
    heads = ("tier", "in use", *bar, "full", "blocks", "evicted", "hit tokens", "hit rate")
    return columns(rows, "<>" + "<" * len(bar) + ">>>>>", heads)


def _documents(documents: Sequence[DocumentUse]) -> RenderableType:
    rows = (
        (_printable(one.name), f"{one.frequency:,.4g}", f"{one.num_tokens:,}", ", ".join(one.tiers))
        for one in documents
    )
    return columns(rows, "<>><", ("hottest documents", "uses", "tokens", "in"))


def _named(values: Iterable[tuple[str, str]]) -> list[RenderableType]:
    return [_line(f"{name:<16} {value}") for name, value in values]


def _line(text: str) -> RenderableType:
    from rich.text import Text

    return Text(printable(text), no_wrap=True, overflow="ellipsis")


def _in_use(tier: TierStats) -> str:
    used = size(tier.used_bytes)
    return f"{used} of {size(tier.capacity_bytes)}" if tier.capacity_bytes else f"{used} known"


def _full(tier: TierStats) -> str:
    return f"{tier.usage:.0%}" if tier.capacity_bytes else "-"


def _bar(tier: TierStats) -> RenderableType:
    from rich.progress_bar import ProgressBar

    return ProgressBar(tier.capacity_bytes or 1, min(tier.used_bytes, tier.capacity_bytes), _BAR_CELLS)


def _printable(doc_id: str) -> str:
    """Return an id without control characters, shortened to fit."""
    shown = printable(doc_id)
    return shown if len(shown) <= _DOC_ID_CHARS else f"{shown[: _DOC_ID_CHARS - 3]}..."


_WATCH_S = 2.0
_MIN_WATCH_S = 0.1


@click.command(
    cls=Command,
    short_help="Print a server's counters, once or repeatedly.",
    examples=[
        "ragcache stats --url http://127.0.0.1:8000 --api-key KEY",
        "ragcache stats --url http://127.0.0.1:8000 --watch",
        "ragcache stats --url http://127.0.0.1:8000 --watch --every 10 --json",
    ],
)
@click.option(
    "--url",
    default="http://127.0.0.1:8000",
    show_default=True,
    metavar="URL",
    help="Address of the server, as 'ragcache serve' prints it.",
)
@api_key_option
@click.option("--watch", is_flag=True, help="Update until Ctrl-C, with rates since the last reading.")
@click.option(
    "--every",
    "every_s",
    type=FiniteRange(min=_MIN_WATCH_S),
    metavar="SECONDS",
    help=f"How long --watch pauses between two readings. [default: {_WATCH_S:g}]",
)
def stats(url: str, api_key: str | None, watch: bool, every_s: float | None, as_json: bool) -> None:
    """Print the counters of the server at URL since it started: hit rates, tiers, hottest documents.

    With --watch the counters fill the terminal and are updated, with rates since the last reading. The watch waits for
    a server that restarts. In a file or a pipe, readings follow each other as plain text. With --json each reading is
    one line, and the watch ends if the server does not answer. Ctrl-C ends it with exit status 0.
    """
    if every_s is not None and not watch:
        raise click.UsageError("--every is the interval of --watch: give --watch as well.")
    try:
        with join_server(url, api_key) as engine:
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
    """Show readings until Ctrl-C. Wait for a server that restarts, except with ``as_json``.

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
    """Prints readings one after the other, as text or JSON lines."""

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
    """Draws each reading over the previous one on the whole terminal, and prints the last one at the end."""

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
