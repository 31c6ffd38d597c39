"""``ragcache serve-store``: a document store that others search over HTTP, in the foreground."""

from __future__ import annotations

import os
from pathlib import Path

import click

from ragcache_core.cli.command import Command, print_json
from ragcache_core.cli.options import STORE_KEY_VARIABLE, EmbedderName, FiniteRange, embedder_option, open_store


@click.command(
    "serve-store",
    cls=Command,
    short_help="Serve the search in a document store over HTTP.",
    examples=[
        "ragcache serve-store notes.store",
        "ragcache serve-store notes.store --host 0.0.0.0 --port 8100 --api-key KEY",
        'ragcache ask "Where does the river Mel end?" --store http://127.0.0.1:8100 --model examples/demo_model',
    ],
)
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8100,
    show_default=True,
    help="The port to listen on; 0 takes a free one.",
)
@click.option(
    "--api-key",
    envvar=STORE_KEY_VARIABLE,
    show_envvar=True,
    metavar="KEY",
    help="What who searches has to send. [default: everybody may search]",
)
@embedder_option
@click.option("--max-k", type=click.IntRange(1), default=1000, show_default=True, help="Documents of a search at most.")
@click.option(
    "--max-searches",
    type=click.IntRange(1),
    default=64,
    show_default=True,
    help="Searches at the same time; more are refused, and a RemoteStore asks again.",
)
@click.option(
    "--search-timeout",
    type=FiniteRange(0, min_open=True),
    default=60.0,
    show_default=True,
    metavar="S",
    help="Seconds that a search may take.",
)
@click.option(
    "--drain",
    type=FiniteRange(0),
    default=20.0,
    show_default=True,
    metavar="S",
    help="Seconds that searches have to end in after SIGTERM.",
)
def serve_store(
    path: Path,
    host: str,
    port: int,
    api_key: str | None,
    embedder: EmbedderName | None,
    max_k: int,
    max_searches: int,
    search_timeout: float,
    drain: float,
    as_json: bool,
) -> None:
    """Serve the document store at PATH until Ctrl-C or SIGTERM (exit status 0).

    It is searched as it is: what 'ragcache index' changes in it meanwhile is found a second later. Without a key
    everybody who reaches the address may search it. After SIGTERM it takes no more searches, and ends when those that
    run have ended; Ctrl-C ends it at once.
    """
    from ragcache_core.retrieval import StoreService

    with (
        open_store(path, embedder, read_only=True) as store,
        StoreService(
            store,
            host=host,
            port=port,
            api_key=api_key,
            max_k=max_k,
            max_searches=max_searches,
            search_timeout_s=search_timeout,
        ) as service,
    ):
        try:
            if as_json:
                print_json({"url": service.url, "store": str(path), "num_documents": len(store), "pid": os.getpid()})
            else:
                click.echo(f"{service.url} serves {path}, {len(store):,} documents")
                click.echo("ready: Ctrl-C ends it", err=True)
            service.wait()
        except KeyboardInterrupt:  # the way to end a server: no error
            click.echo("ragcache: stopping", err=True)
        except SystemExit:  # SIGTERM
            click.echo(f"ragcache: stopping: running searches have {drain:g} s", err=True)
            service.close(drain)
