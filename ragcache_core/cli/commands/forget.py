"""``ragcache forget``: delete documents from a running server's cache."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import click

from ragcache_core.cli.command import Command, print_json
from ragcache_core.cli.options import FiniteRange, api_key_option, join_server
from ragcache_core.cli.output import printable
from ragcache_core.errors import EngineError

if TYPE_CHECKING:
    from ragcache_core.stats import ForgetReceipt
    from ragcache_core.types import DocId

_MAX_WAIT_S = 600.0

forget_option = click.option(
    "--forget",
    "forget_urls",
    multiple=True,
    metavar="URL",
    help="Also delete the KV of replaced or removed documents from this server's cache. May be repeated.",
)

ids_argument = click.argument("ids", nargs=-1, required=True, metavar="ID...")
url_option = click.option(
    "--url", required=True, metavar="URL", help="Address of the server, as 'ragcache serve' prints it."
)
wait_option = click.option(
    "--wait",
    "wait_s",
    type=FiniteRange(min=0, max=_MAX_WAIT_S),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="Seconds to wait for running requests that use the KV, and for the disk to delete it.",
)


@click.command(
    cls=Command,
    short_help="Delete documents from a server's cache.",
    examples=[
        "ragcache forget handbook.md#3 --url http://127.0.0.1:8000 --api-key KEY",
        "ragcache forget faq-7 faq-9 --url http://127.0.0.1:8000 --wait 120 --json",
        "cut -f1 withdrawn.tsv | ragcache forget - --url http://127.0.0.1:8000",
    ],
)
@ids_argument
@url_option
@api_key_option
@wait_option
def forget(ids: tuple[str, ...], url: str, api_key: str | None, wait_s: float, as_json: bool) -> None:
    """Delete the KV of documents from the cache of the server at URL: GPU, host memory, disk, and chunk reuse.

    IDs are those of 'ragcache store ls'; "-" reads them from standard input, one per line. KV of the text
    behind a document in a prompt is deleted too. The store is not changed. Ids without cached KV are listed and are no
    error. Exit status 1: some KV is left after the wait; run the command again.
    """
    wanted = read_ids(ids)
    with join_server(url, api_key) as engine:
        receipt = engine.forget(wanted, wait_s=wait_s)
    if as_json:
        print_json({"url": engine.base_url, **receipt.to_dict()})
    else:
        click.echo("\n".join(lines_of(receipt)))
    check_complete({url: receipt})


def read_ids(ids: Sequence[str]) -> list[DocId]:
    """Return the given ids; "-" reads them from standard input, one per line."""
    return [each for doc_id in ids for each in ([doc_id] if doc_id != "-" else sys.stdin.read().splitlines()) if each]


def lines_of(receipt: ForgetReceipt) -> list[str]:
    """Return a receipt as text."""
    tiers = [f"{tier} {receipt.num_blocks.get(tier, 0)} blocks ({_size(n)})" for tier, n in receipt.num_bytes.items()]
    chunks = f", {receipt.num_variants} versions for chunk reuse" * bool(receipt.num_variants)
    lines = [
        f"forgotten {len(receipt.forgotten)} of {len(receipt.forgotten) + len(receipt.unknown)} documents behind "
        f"{receipt.num_paths} prefixes in {receipt.duration_s:.2f} s: "
        f"{', '.join(tiers) or 'nothing was cached'}{chunks}"
    ]
    return [*lines, *lines_of_unknown(receipt.unknown), *(f"not searched: {each}" for each in receipt.unsearched)]


def lines_of_unknown(doc_ids: Sequence[DocId]) -> list[str]:
    """Return a line with the ids without KV on the server; empty if there are none."""
    named = ", ".join(map(printable, doc_ids[:10])) + ", ..." * (len(doc_ids) > 10)
    return [f"unknown to this server: {named}"] if doc_ids else []


@contextmanager
def forgetting(
    urls: Sequence[str], api_key: str | None
) -> Iterator[Callable[[Sequence[DocId]], dict[str, ForgetReceipt]]]:
    """Yield a function that deletes a store's changed documents from the caches of servers.

    A server that does not answer is an error before anything is changed; one that does not forget says what to do.
    """
    with ExitStack() as opened:
        engines = {url: opened.enter_context(join_server(url, api_key)) for url in urls}

        def forget_documents(doc_ids: Sequence[DocId]) -> dict[str, ForgetReceipt]:
            receipts: dict[str, ForgetReceipt] = {}
            for url, engine in engines.items():
                try:
                    receipts[url] = engine.forget(doc_ids)
                except EngineError as error:
                    named = " ".join(map(shlex.quote, doc_ids[:10])) + " ..." * (len(doc_ids) > 10)
                    raise EngineError(
                        f"the store is changed, but the cache of {url} still has {len(doc_ids)} removed "
                        f"documents ({error}): run 'ragcache forget {named} --url {url}' when the server "
                        "answers"
                    ) from error
            return receipts

        yield forget_documents


def check_complete(receipts: Mapping[str, ForgetReceipt]) -> None:
    """Raise EngineError if some KV is left on a server."""
    for receipt in receipts.values():
        if not receipt.is_complete:
            raise EngineError(why_incomplete(receipt))


def why_incomplete(receipt: ForgetReceipt) -> str:
    """Return the KV that is left, with a hint."""
    parts = [
        f"{receipt.num_requests} running requests still use it" * bool(receipt.num_requests),
        f"{receipt.num_pending} blocks are still being copied or overwritten" * bool(receipt.num_pending),
        *receipt.problems,
    ]
    return f"not all KV is deleted: {'; '.join(filter(None, parts))}: run it again later, or with a longer --wait"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.1f} MiB"
