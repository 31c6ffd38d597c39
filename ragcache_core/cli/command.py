"""The base of every command: ``--json``, ``--debug``, examples in the help, one-line errors, exit status."""

from __future__ import annotations

import json
import logging
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

import click

from ragcache_core.errors import ConfigError, RAGCacheError
from ragcache_core.log import ROOT as LOG_ROOT
from ragcache_core.runtime.json_lines import json_line

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
    "leave shared_bytes out": "leave --shared-bytes out",
    "set shared_read_only": "set --shared-read-only",
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
    """Return ``message`` with its hints in the words of the command line."""
    for in_the_library, typed in _AS_TYPED.items():
        message = message.replace(in_the_library, typed)
    return message


@contextmanager
def options_in_cli_wording(command: click.Command) -> Iterator[None]:
    """Convert setting names in errors to the options of ``command``."""
    names = {str(option.name): option.opts[0] for option in command.params}
    try:
        yield
    except ConfigError as error:
        message = re.sub(
            r"\bCacheConfig\.(\w+)|^\w+|\b[a-z]+(?:_[a-z]+)+\b",
            lambda word: names.get(word[1] or word[0], word[0]),
            str(error),
        )
        raise ConfigError(message) from error


EXIT_ERROR, EXIT_INTERRUPTED, EXIT_TERMINATED = 1, 130, 143
_DEBUG = "ragcache.debug"


class Command(click.Command):
    """A command with ``--json`` and ``--debug``, whose help ends with ``examples`` and whose errors are one line.

    Its function takes ``as_json``. A file is ``--output`` wherever a command writes one.
    """

    def __init__(self, *args: Any, examples: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples = tuple(examples)
        self.params.append(
            click.Option(
                ["--json", "as_json"], is_flag=True, help="Print the result, and errors, as JSON on standard output."
            )
        )
        self.params.append(
            click.Option(
                ["--debug"],
                is_flag=True,
                expose_value=False,
                callback=_keep_debug,
                help="Show the traceback of an error.",
            )
        )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse ``args``; for commands that pass on vLLM's options, explain where an unknown option goes."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if not any(isinstance(each, click.Argument) and each.name == "vllm_args" for each in self.params):
                raise
            from ragcache_core.client.launch.arguments import is_vllm_flag

            message, possibilities = f"{error.message} vLLM's own options follow '--'.", error.possibilities
            if is_vllm_flag(error.option_name):
                message = f"{error.option_name} is an option of vLLM's server: write '-- {error.option_name}'."
                possibilities = None
            raise click.NoSuchOption(error.option_name, message, possibilities, error.ctx) from None

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; an error becomes a line on standard error and an exit status."""
        try:
            with _sigterm_exits():
                return super().invoke(ctx)
        except (click.ClickException, click.Abort, click.exceptions.Exit, BrokenPipeError):
            raise  # these are click's
        except KeyboardInterrupt:
            if ctx.meta.get(_DEBUG):
                traceback.print_exc()
            click.echo("ragcache: interrupted", err=True)
            ctx.exit(EXIT_INTERRUPTED)
        except Exception as error:
            if ctx.meta.get(_DEBUG):
                traceback.print_exc()
            report(error, as_json=bool(ctx.params.get("as_json")), as_lines=ctx.params.get("log_format") == "json")
            ctx.exit(EXIT_ERROR)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples."""
        if self.examples:
            with formatter.section("Examples"):
                for example in self.examples:
                    formatter.write(f"{'':>{formatter.current_indent}}{example}\n")


class CommandGroup(Command, click.Group):
    """A command with subcommands that also runs by itself."""

    command_class = Command

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, invoke_without_command=True, **kwargs)


class Group(click.Group):
    """A group of commands; an interruption anywhere is exit status 130."""

    command_class = Command

    def main(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Run the command line and exit."""
        try:
            with _warnings_as_typed():
                status = super().main(*args, **{**kwargs, "standalone_mode": False})
        except click.ClickException as error:
            error.show()
            given = list(args[0] if args and args[0] is not None else kwargs.get("args") or sys.argv[1:])
            if "--json" in given[: given.index("--") if "--" in given else None]:
                print_json({"error": {"type": type(error).__name__, "message": error.format_message()}})
            sys.exit(error.exit_code)
        except click.Abort:
            sys.exit(EXIT_INTERRUPTED)
        sys.exit(status if isinstance(status, int) else 0)


def print_json(data: Mapping[str, object]) -> None:
    """Print one JSON object as one line of UTF-8; other characters, as in file names, are escaped."""
    click.echo(json.dumps(data, ensure_ascii=False, default=str).encode("utf-8", "backslashreplace"))


def _keep_debug(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    ctx.meta[_DEBUG] = value


def report(error: Exception, *, as_json: bool, as_lines: bool = False) -> None:
    """Print an error: one line, then details such as the server's log; ``as_lines``: as one JSON line."""
    message = to_cli_wording(str(error))
    if not isinstance(error, (RAGCacheError, OSError)):
        message = f"unexpected {type(error).__name__}: {message} (--debug shows where)"
    if as_lines:
        say(message, level="ERROR", as_json=True)
        return
    first, *log_tail = message.strip().split("\n")
    click.echo(f"ragcache: error: {first}", err=True)
    for line in log_tail:  # a server that did not start says why in its log
        click.echo(f"  {line}", err=True)
    if as_json:
        print_json({"error": {"type": type(error).__name__, "message": message}})


def engine_progress(*, as_json: bool = False) -> Callable[[str], None] | None:
    """Return what prints each stage of an engine's start as a line; None on a terminal, which shows a bar."""
    return None if sys.stderr.isatty() else lambda stage: say(f"engine: {stage}", as_json=as_json)


def say(message: str, *, level: str = "INFO", as_json: bool = False) -> None:
    """Print a progress line on standard error, as text or JSON."""
    shown = {"INFO": "", "WARNING": "warning: ", "ERROR": "error: "}[level]
    text = json_line(message, level=level, source="ragcache") if as_json else f"ragcache: {shown}{message}"
    click.echo(text, err=True)


class _TypedWarnings(logging.Handler):
    """Shows a warning or error as one line on standard error, with hints in the words of the command line."""

    as_json = False

    def emit(self, record: logging.LogRecord) -> None:
        level = "WARNING" if record.levelno < logging.ERROR else "ERROR"
        say(to_cli_wording(record.getMessage()), level=level, as_json=self.as_json)


@contextmanager
def warnings_in_json(is_wanted: bool) -> Iterator[None]:
    """Show warnings of all threads as JSON lines meanwhile, if ``is_wanted``."""
    _TypedWarnings.as_json = is_wanted
    try:
        yield
    finally:
        _TypedWarnings.as_json = False


@contextmanager
def _warnings_as_typed() -> Iterator[None]:
    logger, handler = logging.getLogger(LOG_ROOT), _TypedWarnings(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


@contextmanager
def _sigterm_exits() -> Iterator[None]:
    """Raise an exception on SIGTERM, so that engines and files are closed."""

    def exit_(_signum: int, _frame: FrameType | None) -> NoReturn:
        raise SystemExit(EXIT_TERMINATED)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, exit_)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
