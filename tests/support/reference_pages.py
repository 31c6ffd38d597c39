"""Write the page of the documentation that is made from the commands: ``make reference`` writes ``reference/cli.md``.

``tests/unit/core/test_docs.py`` compares the committed page with the commands.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click

from ragcache_core.cli import cli
from ragcache_core.cli.commands.simulate import run, simulate

DOCS = Path(__file__).resolve().parents[2] / "docs"
CLI_PAGE = DOCS / "reference" / "cli.md"
INTRODUCTION = """# CLI

<!-- Made by `make reference` from the commands themselves. -->

Each command has `--help` with examples, and `--json` for JSON on standard output. Sizes are texts such as `64GiB`.

| exit code | meaning |
|---|---|
| 0 | success |
| 1 | error: one line on standard error |
| 2 | wrong usage |
| 130 | interrupted (Ctrl-C) |
| 143 | terminated (SIGTERM) |

Guides to the commands: `index` and `ask` in
[LangChain, LlamaIndex, plain Python](../guides/frameworks.md#the-built-in-search), `serve` in the
[server quickstart](../get-started/server.md), `stats` in [monitoring](../operate/monitoring.md), `cache` in
[manage the cache](../operate/cache.md), `forget` in [documents that change](../guides/forget.md), `warm` in
[warm-up](../operate/warming.md), `profile` in [sizing](../guides/sizing.md), `quality` and `calibrate` in
[chunk reuse](../guides/chunk-reuse.md), `trace`, `simulate`, `advise` and `bench` in
[simulate your traffic](../guides/simulate.md).
"""


def cli_page() -> str:
    """Return the page about the command line: each command's usage, description, options and examples."""
    context = click.Context(cli, info_name="ragcache", max_content_width=100)
    return "\n".join([INTRODUCTION, *_sections(cli, context)])


def _sections(group: click.Group, context: click.Context) -> Iterator[str]:
    """Yield a section for each command, and below it those of its own commands."""
    for name, command in sorted(group.commands.items()):
        own = click.Context(command, info_name=name, parent=context, max_content_width=100)
        yield _section(run if command is simulate else command, own)  # `simulate TRACE` needs no further word
        if isinstance(command, click.Group):
            yield from _sections(command, own)


def _section(command: click.Command, context: click.Context) -> str:
    usage = re.sub(r"\s+", " ", command.get_usage(context).removeprefix("Usage: "))
    parts = [f"## `{context.command_path}`", _prose(command.help or ""), f"```text\n{usage}\n```"]
    rows = [_row(option) for option in command.params if isinstance(option, click.Option) and not option.hidden]
    parts.append("\n".join(["| option | meaning |", "|---|---|", *rows]))
    if examples := getattr(command, "examples", ()):
        parts.append("\n".join(["```text", *examples, "```"]))
    return "\n\n".join(part for part in parts if part) + "\n"


def _row(option: click.Option) -> str:
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    kind = "" if option.is_flag or option.metavar is None else f" `{_cell(option.metavar)}`"
    help_text = re.sub(r"\s+", " ", option.help or "").strip()
    if (choices := getattr(option.type, "choices", None)) is not None:
        help_text += " One of " + ", ".join(f"`{choice}`" for choice in choices) + "."
    if option.show_default and option.default is not None and isinstance(option.default, str | int | float):
        help_text += f" Default: `{option.default}`."
    if option.envvar is not None:
        help_text += f" Environment variable: `{option.envvar}`."
    if option.required:
        help_text += " Required."
    return f"| {names}{kind} | {_cell(help_text)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _prose(text: str) -> str:
    return "\n\n".join(
        re.sub(r"\s+", " ", paragraph).strip().replace("<", "&lt;") for paragraph in text.strip().split("\n\n")
    )


if __name__ == "__main__":
    CLI_PAGE.write_text(cli_page(), encoding="utf-8")
