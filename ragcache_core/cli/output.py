"""What commands that run for a while show meanwhile, and the file that they leave."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from ragcache_core.errors import ConfigError


@contextmanager
def counting_requests(name: str, num_requests: int) -> Iterator[Callable[[int], object]]:
    """Yield what takes how many more requests are done; a bar on a terminal."""
    from tqdm import tqdm

    with tqdm(
        total=num_requests, desc=name, unit="req", unit_scale=True, leave=False, disable=not sys.stderr.isatty()
    ) as bar:
        yield bar.update


def output_option(what: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the ``--output`` of a command: the file that it writes, after :func:`check_output`."""
    return click.option("--output", type=click.Path(path_type=Path, dir_okay=False), metavar="OUT", help=what)


def check_output(option: str, path: Path | None, inputs: Iterable[Path] = ()) -> None:
    """Refuse a file that could not be written, or is one of ``inputs``, before a long run. Its folder may be missing.

    Raises:
        ConfigError: with the option, the file and why.
    """
    if path is None:
        return
    check_no_input(option, path, inputs)
    if path.is_dir():
        raise ConfigError(f"{option} {path} is a directory: name a file")
    folder = path.parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        raise ConfigError(f"{option} {path} cannot be written, {folder} is no directory: make it, or name another")
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"{option} {path} cannot be written, {folder} is not writable: name a file elsewhere")


def check_no_input(option: str, path: Path, inputs: Iterable[Path]) -> None:
    """Refuse an output that is one of the files to be read, under whatever name.

    Raises:
        ConfigError: with the option and the file.
    """
    for source in inputs:
        if path.is_file() and source.is_file() and path.samefile(source):  # a terminal may be both
            raise ConfigError(f"{option} {path} would overwrite {source}, which is read: name another file")


def write_json(data: Mapping[str, object], path: Path) -> None:
    """Write a JSON file, and its folder; what was there before stays until the new one is whole."""
    text = json.dumps(data, indent=2) + "\n"
    if path.exists() and not path.is_file():  # a pipe, a terminal: nothing to be replaced
        path.write_text(text, encoding="utf-8")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
