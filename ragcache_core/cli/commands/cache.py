"""``ragcache cache``: inspect and manage the cache of a running server."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ragcache_core.cli.command import Command, Group, print_json
from ragcache_core.cli.commands.forget import (
    check_complete,
    forget,
    ids_argument,
    lines_of,
    lines_of_unknown,
    read_ids,
    url_option,
    wait_option,
)
from ragcache_core.cli.options import FiniteRange, api_key_option, join_server
from ragcache_core.cli.output import printable, size
from ragcache_core.runtime.terminal import columns, plain
from ragcache_core.stats import CONTENTS_ORDERS, MAX_LISTED

if TYPE_CHECKING:
    from ragcache_core.stats import CacheContents, CachedDocument, CollectedFolders, PinReceipt
    from ragcache_core.types import DocId

_TIERS = ("gpu", "host", "disk")
_MAX_DAYS = 100_000.0


@click.group(cls=Group, short_help="Inspect and manage a server's cache.")
def cache() -> None:
    """Inspect and manage the cache of the server at URL: list, pin, prefetch and delete documents."""


@cache.command(
    cls=Command,
    short_help="List the cached documents.",
    examples=[
        "ragcache cache ls --url http://127.0.0.1:8000",
        "ragcache cache ls --url http://127.0.0.1:8000 --sort saved --limit 10 --json",
    ],
)
@url_option
@api_key_option
@click.option(
    "--sort",
    type=click.Choice(CONTENTS_ORDERS),
    default="bytes",
    show_default=True,
    help="Sort by bytes over all tiers, uses, seconds of compute saved (each largest first), or age (oldest first).",
)
@click.option(
    "--limit",
    type=click.IntRange(1, MAX_LISTED),
    default=50,
    show_default=True,
    help="Maximum number of documents to list.",
)
def ls(url: str, api_key: str | None, sort: str, limit: int, as_json: bool) -> None:
    """List documents: bytes by tier, number of prefixes and of cached versions, uses, seconds of compute saved."""
    with join_server(url, api_key) as engine:
        contents = engine.cache.ls(sort=sort, limit=limit)
    if as_json:
        print_json({"url": engine.base_url, **contents.to_dict()})
        return
    click.echo(_table(contents))
    if len(contents.documents) < contents.total:
        click.echo(f"{len(contents.documents):,} of {contents.total:,} documents; more: --limit")


@cache.command(
    cls=Command,
    short_help="Show the prefixes and tiers of documents.",
    examples=["ragcache cache show handbook.md#3 --url http://127.0.0.1:8000"],
)
@ids_argument
@url_option
@api_key_option
def show(ids: tuple[str, ...], url: str, api_key: str | None, as_json: bool) -> None:
    """Show the prefixes under which documents are cached, with bytes by tier.

    Ids without cached KV are listed and are no error.
    """
    with join_server(url, api_key) as engine:
        contents = engine.cache.show(read_ids(ids))
    if as_json:
        print_json({"url": engine.base_url, **contents.to_dict()})
        return
    for document in contents.documents:
        click.echo("\n".join(_lines_of_document(document)))
    _echo_unknown(contents.unknown)


@cache.command(
    cls=Command,
    short_help="Evict documents last.",
    examples=[
        "ragcache cache pin terms.md faq.md --url http://127.0.0.1:8000",
        "cut -f1 important.tsv | ragcache cache pin - --url http://127.0.0.1:8000",
    ],
)
@ids_argument
@url_option
@api_key_option
def pin(ids: tuple[str, ...], url: str, api_key: str | None, as_json: bool) -> None:
    """Evict documents last from every tier, until they are unpinned, forgotten, or the engine ends.

    Together their prefixes may take a share of the smallest tier, --pinned-share of 'ragcache serve'. A pin beyond it
    is rejected as a whole. Ids without cached KV are listed, are not pinned, and are no error.
    """
    with join_server(url, api_key) as engine:
        _print_pins(engine.base_url, "pinned", engine.cache.pin(read_ids(ids)), as_json=as_json)


@cache.command(
    cls=Command,
    short_help="Unpin documents.",
    examples=["ragcache cache unpin terms.md --url http://127.0.0.1:8000"],
)
@ids_argument
@url_option
@api_key_option
def unpin(ids: tuple[str, ...], url: str, api_key: str | None, as_json: bool) -> None:
    """Unpin documents: they are evicted as usual again. Ids that were not pinned are listed and are no error."""
    with join_server(url, api_key) as engine:
        _print_pins(engine.base_url, "unpinned", engine.cache.unpin(read_ids(ids)), as_json=as_json)


@cache.command(
    cls=Command,
    short_help="Read documents from disk into host memory.",
    examples=["ragcache cache prefetch terms.md faq.md --url http://127.0.0.1:8000"],
)
@ids_argument
@url_option
@api_key_option
def prefetch(ids: tuple[str, ...], url: str, api_key: str | None, as_json: bool) -> None:
    """Read blocks of documents that are only on disk into host memory, without waiting for them.

    They are evicted as usual. Ids without cached KV are listed and are no error.
    """
    with join_server(url, api_key) as engine:
        receipt = engine.cache.prefetch(read_ids(ids))
    if as_json:
        print_json({"url": engine.base_url, **receipt.to_dict()})
        return
    left_out = f"; {receipt.num_left_out} prefixes are too long for host memory" * bool(receipt.num_left_out)
    click.echo(f"{receipt.num_read_tokens:,} tokens of {receipt.num_paths} prefixes are being read from disk{left_out}")
    _echo_unknown(receipt.unknown)


@cache.command(
    cls=Command,
    short_help="Delete unused cache namespaces on disk.",
    examples=[
        "ragcache cache gc --url http://127.0.0.1:8000 --dry-run",
        "ragcache cache gc --cache-dir ~/.cache/ragcache/kv --unused-days 0",
    ],
)
@click.option("--url", metavar="URL", help="Server whose cache directory is cleaned.")
@api_key_option
@click.option(
    "--cache-dir", type=click.Path(path_type=Path), metavar="DIR", help="Cache directory to clean, without a server."
)
@click.option(
    "--unused-days",
    type=FiniteRange(min=0, max=_MAX_DAYS),
    default=7.0,
    show_default=True,
    metavar="DAYS",
    help="Delete namespaces that no engine has used for this many days.",
)
@click.option("--dry-run", is_flag=True, help="List what would be deleted, without deleting it.")
def gc(
    url: str | None, api_key: str | None, cache_dir: Path | None, unused_days: float, dry_run: bool, as_json: bool
) -> None:
    """Delete unused cache namespaces: those of other models, weights and releases, which no engine has open.

    Give --url or --cache-dir. An engine's start deletes namespaces unused for 30 days.
    """
    from ragcache_core.chunkstore.old_namespaces import delete_unused

    if (url is None) == (cache_dir is None):
        raise click.UsageError("Give either --url or --cache-dir.")
    if cache_dir is not None:
        collected = delete_unused(cache_dir, unused_s=unused_days * 86_400.0, dry_run=dry_run)
    else:
        assert url is not None
        with join_server(url, api_key) as engine:
            collected = engine.cache.gc(unused_days=unused_days, dry_run=dry_run)
    if as_json:
        print_json(collected.to_dict())
    else:
        click.echo("\n".join(_lines_of_folders(collected)))


@cache.command(
    cls=Command,
    short_help="Delete all cached KV.",
    examples=["ragcache cache purge --url http://127.0.0.1:8000 --yes"],
)
@url_option
@api_key_option
@wait_option
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
def purge(url: str, api_key: str | None, wait_s: float, yes: bool, as_json: bool) -> None:
    """Delete all cached KV: GPU, host memory, disk, and versions for chunk reuse; pins end.

    Running requests keep their blocks until they finish. Exit status 1 if something is left after the wait.
    """
    with join_server(url, api_key) as engine:
        if not yes:
            if not sys.stdin.isatty():
                raise click.UsageError("There is no terminal to confirm on: give --yes to remove everything.")
            click.confirm(f"Remove everything that {engine.base_url} has cached?", abort=True, err=True)
        receipt = engine.cache.purge(wait_s=wait_s)
    if as_json:
        print_json({"url": engine.base_url, **receipt.to_dict()})
    else:
        click.echo("\n".join(lines_of(receipt)))
    check_complete({url: receipt})


cache.add_command(forget)


def _table(contents: CacheContents) -> str:
    if not contents.documents:
        return "no document is cached"
    rows = (
        (
            *(size(document.bytes.get(tier, 0)) if document.bytes.get(tier) else "-" for tier in _TIERS),
            str(document.paths),
            str(document.variants or "-"),
            f"{document.uses:,}",
            f"{document.saved_s:.2f} s",
            _age(document.age_s),
            printable(document.id) + " (pinned)" * document.pinned,
        )
        for document in contents.documents
    )
    heads = (*_TIERS, "paths", "variants", "uses", "saved", "age", "document")
    return plain(columns(rows, ">>>>>>>><", heads))


def _lines_of_document(document: CachedDocument) -> list[str]:
    pinned = ", pinned" * document.pinned
    lines = [
        f"{printable(document.id)}: {document.tokens:,} tokens, {document.uses:,} uses, {document.saved_s:.2f} s of "
        f"compute saved, {_age(document.age_s)} old, {document.variants} versions for chunk reuse{pinned}"
    ]
    for place in document.places:
        behind = " > ".join(map(printable, place.behind)) or "nothing"
        here = ", ".join(f"{tier} {size(place.bytes[tier])}" for tier in _TIERS if place.bytes.get(tier))
        lines.append(f"  behind {behind}: {here or 'evicted'}; {place.uses:,} uses")
    return lines


def _age(age_s: float | None) -> str:
    if age_s is None:
        return "-"
    for seconds, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if age_s >= seconds:
            return f"{age_s / seconds:.1f} {unit}"
    return f"{age_s:.0f} s"


def _print_pins(url: str, done: str, receipt: PinReceipt, *, as_json: bool) -> None:
    if as_json:
        print_json({"url": url, **receipt.to_dict()})
        return
    click.echo(
        f"{done} {len(receipt.changed)} documents; {receipt.num_pinned} are pinned, with {size(receipt.num_bytes)} "
        f"of at most {size(receipt.limit_bytes)}"
    )
    _echo_unknown(receipt.unknown)


def _echo_unknown(doc_ids: Sequence[DocId]) -> None:
    for line in lines_of_unknown(doc_ids):
        click.echo(line)


def _lines_of_folders(collected: CollectedFolders) -> list[str]:
    done = "would be deleted" if collected.dry_run else "deleted"
    lines = [f"{size(f.num_bytes):>10}  {f.days:.1f} days  {printable(f.path)}" for f in collected.folders]
    return [*lines, f"{len(collected.folders)} folders with {size(collected.num_bytes)} {done}"]
