"""How ``ragcache index`` splits texts: by characters, or by tokens of a model, and each store always the same way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ragcache_core.errors import ConfigError

if TYPE_CHECKING:
    from ragcache_core.ingest import Chunking, Splitting

_DEFAULT_TOKENS = 512

_OPTIONS: tuple[Callable[[Callable[..., Any]], Callable[..., Any]], ...] = (
    click.option("--chunk-chars", type=int, help="Longest chunk, in characters. [default: the store's own; 1600]"),
    click.option(
        "--chunk-min-chars", type=int, help="End a chunk at its best seam after that many. [default: the longest]"
    ),
    click.option("--chunk-overlap-chars", type=int, help="Repeat the end of a chunk. [default: the store's own; 0]"),
    click.option(
        "--tokenizer",
        metavar="MODEL",
        help="Split by tokens of a model: a folder, or a name of the hub. [default: the store's own; by characters]",
    ),
    click.option("--chunk-tokens", type=int, help="Longest chunk, in tokens. [default: the store's own; 512]"),
    click.option(
        "--chunk-min-tokens", type=int, help="End a chunk at its best seam after that many. [default: the longest]"
    ),
    click.option("--chunk-overlap-tokens", type=int, help="Repeat the end of a chunk. [default: the store's own; 0]"),
)
_LENGTHS = {"chunk_{}": "max_length", "chunk_min_{}": "min_length", "chunk_overlap_{}": "overlap"}


def splitting_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that say how texts are split; the command gets them under their own names."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def choose_splitting(store: Path, asked: dict[str, Any]) -> tuple[Splitting, Chunking]:
    """Return how texts for the store at ``store`` are split, and what is to be noted of it.

    What the options do not say is as it was; by tokens a store is split by those of one tokenizer, or not at all.

    Raises:
        ConfigError: the options contradict each other, or what the store was split by.
        TokenizerUnavailableError: there is no such tokenizer.
    """
    from ragcache_core.ingest import Chunking, Splitting, read_chunking, read_origins

    former = read_chunking(store) or (Chunking() if store.is_dir() and read_origins(store) else None)
    chars, tokens = (
        {name: asked[key] for pattern, name in _LENGTHS.items() if asked[key := pattern.format(unit)] is not None}
        for unit in ("chars", "tokens")
    )
    name = asked["tokenizer"]
    if chars and (tokens or name is not None):
        raise ConfigError("chunks are cut by characters or by tokens: leave the --chunk options of one of them out")
    by_tokens = bool(tokens or name is not None)
    if former is not None and (chars or by_tokens) and by_tokens != (former.unit == "tokens"):
        raise ConfigError(
            f"{store} is split by {former.unit}, not by {'tokens' if by_tokens else 'characters'}: leave the --chunk "
            "options and --tokenizer out, or choose another --store"
        )
    if name is None and former is not None:
        name = former.tokenizer
    if name is None:
        if tokens:
            raise ConfigError("tokens are those of a model: name it with --tokenizer MODEL")
        chunking = replace(former or Chunking(), **chars)
        return Splitting(chunking.max_length, chunking.min_length, chunking.overlap), chunking
    counted, sha256 = _token_counter(name)
    if former is not None and former.tokenizer_sha256 != sha256:
        raise ConfigError(
            f"{store} is split by the tokens of {former.tokenizer} as it was then, and {name} counts differently: "
            "name that one with --tokenizer, or choose another --store"
        )
    place = str(folder.absolute()) if (folder := Path(name)).is_dir() else name
    before = former or Chunking(max_length=_DEFAULT_TOKENS)
    chunking = replace(before, tokenizer=place, tokenizer_sha256=sha256, **tokens)
    return Splitting(chunking.max_length, chunking.min_length, chunking.overlap, counted), chunking


def _token_counter(name: str) -> tuple[Callable[[str], int], str]:
    """Return what counts the tokens of a text, and the hash of the tokenizer that does."""
    from ragcache_core.ingest.token_counter import TokenCounter

    counter = TokenCounter(name)
    return counter.num_tokens, counter.sha256
