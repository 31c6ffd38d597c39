"""``ragcache stats``: what a running server says about its cache."""

from __future__ import annotations

import click

from ragcache_core.cli.command import Command, print_json
from ragcache_core.cli.options import api_key_option


@click.command(
    cls=Command,
    examples=[
        "ragcache stats --url http://127.0.0.1:8000 --api-key KEY",
        "ragcache stats --url http://127.0.0.1:8000 --json",
    ],
)
@click.option("--url", required=True, metavar="URL", help="The server's address, as 'ragcache serve' prints it.")
@api_key_option
def stats(url: str, api_key: str | None, as_json: bool) -> None:
    """Print the counters of the server at URL since it started."""
    from ragcache_core.client import Engine

    with Engine.connect(url, api_key=api_key) as engine:
        reading, model = engine.stats(), engine.model
    if as_json:
        print_json({"model": model, **reading.to_dict()})
        return
    rows = [
        ("model", model),
        ("requests", f"{reading.num_running} running, {reading.num_waiting} waiting"),
        ("KV cache in use", f"{reading.kv_cache_usage:.1%}"),
        ("prompt tokens", f"{reading.num_prompt_tokens:,}"),
        ("output tokens", f"{reading.num_output_tokens:,}"),
        (
            "found in cache",
            f"{reading.num_prefix_hit_tokens:,} of {reading.num_prefix_query_tokens:,} tokens "
            f"({reading.prefix_hit_rate:.1%})",
        ),
        ("preemptions", f"{reading.num_preemptions:,}"),
    ]
    for name, value in rows:
        click.echo(f"{name:<16} {value}")
