"""Errors say how to cure them in the library's words; on the command line the same cures are options."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import click

from ragcache_core.errors import ConfigError

_AS_TYPED = {
    "make one with DocumentStore.create": "make one with 'ragcache index DIR --store PATH'",
    "open the store with rebuild_index=True": "run 'ragcache index' with --rebuild-index",
    "close that one, or open this one with read_only=True": "wait until it is done",
    "pass it to open the store": "choose it with --embedder",
    "leave it out, the store holds its own": "leave --embedder out, the store holds its own",
    "use a smaller k": "use a smaller --k",
    "lower max_tokens": "lower --max-tokens",
    "launch the engine with a larger max_model_len": "launch the engine with a larger -- --max-model-len",
    "pass the server's api_key": "pass the server's with --api-key",
    ": lower max_model_len": ": lower -- --max-model-len",
    "raise startup_timeout_s": "raise --startup-timeout",
    "raise max_file_bytes": "raise --max-file-bytes",
    "raise max_file_s": "raise --max-file-seconds",
    "set log_path": "set --log",
    "choose another port, or leave it out for a free one": "choose another --port, or --port 0 for a free one",
    "use 127.0.0.1, or 0.0.0.0 for all it has": "set --host to 127.0.0.1, or to 0.0.0.0 for all it has",
    "or connect to an engine that runs elsewhere": "or name an engine that runs elsewhere with --url to the other "
    "commands",
    "give each engine a directory of its own": "give each engine a --cache-dir of its own",
    "set disk_bytes": "set --disk-bytes",
    "lower disk_bytes": "lower --disk-bytes",
    "leave disk_bytes out": "leave --disk-bytes out",
    "leave shared out": "leave --shared out",
    "set host_bytes": "set --host-bytes",
    "lower host_bytes": "lower --host-bytes",
    "lower kv_cache_bytes": "lower --kv-cache-bytes",
    "Raise kv_cache_bytes, or lower max_model_len": "Raise --kv-cache-bytes, or lower -- --max-model-len",
    "so set block_size": "so set --block-size",
    "leave directory out": "leave --cache-dir out",
    "choose another directory": "choose another --cache-dir",
}
"""A phrase of the library that is reworded without this table stays as it is."""


def to_cli_wording(message: str) -> str:
    """Return ``message`` with its cures as they are typed."""
    for in_the_library, typed in _AS_TYPED.items():
        message = message.replace(in_the_library, typed)
    return message


@contextmanager
def options_in_cli_wording(command: click.Command) -> Iterator[None]:
    """Let an error that names settings name the options of ``command``."""
    names = {str(option.name): option.opts[0] for option in command.params}
    try:
        yield
    except ConfigError as error:
        message = re.sub(r"^\w+|\b[a-z]+(_[a-z]+)+\b", lambda word: names.get(word[0], word[0]), str(error))
        raise ConfigError(message) from error
