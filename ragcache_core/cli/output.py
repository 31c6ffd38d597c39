"""Progress and output files of long commands."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from ragcache_core.errors import ConfigError
from ragcache_core.private_files import make_folders, replacing
from ragcache_core.runtime.terminal import Bar

_PLOT_KINDS = (".png", ".svg", ".html")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def printable(text: str) -> str:
    """Return a text without control characters."""
    return "".join(character if character.isprintable() else "?" for character in text)


def size(num_bytes: int) -> str:
    """Return a number of bytes as readable text."""
    value, unit = float(num_bytes), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.1f} {_UNITS[unit]}" if unit else f"{num_bytes} B"


@contextmanager
def counting_requests(name: str, num_requests: int) -> Iterator[Callable[[int], object]]:
    """Yield a callback for finished requests; it draws a bar on a terminal."""
    with Bar(name, num_requests, "requests") as bar:
        yield bar.advance


def output_option(what: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the option ``--output``: the file that a command writes, after :func:`check_output`."""
    return click.option("--output", type=click.Path(path_type=Path, dir_okay=False), metavar="OUT", help=what)


def check_output(option: str, path: Path | None, inputs: Iterable[Path] = ()) -> None:
    """Reject an unwritable file, or one of ``inputs``, before a long run. Its folder may be missing.

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


def check_outputs(outputs: Mapping[str, Path | None], inputs: Iterable[Path] = ()) -> None:
    """Reject what :func:`check_output` does for several options, and equal files of two options.

    Raises:
        ConfigError: with the option, the file and why.
    """
    option_of: dict[Path, str] = {}
    for option, path in outputs.items():
        check_output(option, path, inputs)
        if path is not None and (other := option_of.setdefault(path.absolute(), option)) != option:
            raise ConfigError(f"{other} and {option} are both {path}, and one would replace the other: name two files")


def check_plot(path: Path | None) -> None:
    """Reject an impossible plot before a long run.

    Raises:
        click.UsageError: of an unknown kind. ConfigError: matplotlib is not installed.
    """
    if path is None:
        return
    if path.suffix not in _PLOT_KINDS:
        raise click.UsageError(f"--plot {path}: the name must end in {', '.join(_PLOT_KINDS)}.")
    require_matplotlib("--plot")


def require_matplotlib(option: str) -> None:
    """Raise without matplotlib, before a long run.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise ConfigError(
            f'{option} draws plots with matplotlib, which is not installed: pip install "ragcache[bench]"'
        )


def check_no_input(option: str, path: Path, inputs: Iterable[Path]) -> None:
    """Reject an output that is an input file, under any name.

    Raises:
        ConfigError: with the option and the file.
    """
    for source in inputs:
        if path.is_file() and source.is_file() and path.samefile(source):  # a terminal may be both
            raise ConfigError(f"{option} {path} would overwrite {source}, which is read: name another file")


def write_output(data: Mapping[str, object], path: Path | None) -> None:
    """Write the JSON file of ``--output`` and its folder atomically, and report it; nothing without a path."""
    if path is not None:
        make_folders(path.parent)
        with replacing(path) as file:
            file.write(json.dumps(data, indent=2).encode() + b"\n")
        say_written(path)


def say_written(path: Path) -> None:
    """Report a file that was written."""
    click.echo(f"ragcache: written to {path}", err=True)
