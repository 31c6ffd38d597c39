"""What all commands have in common."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import ragcache_core
from ragcache_core.cli import cli
from ragcache_core.cli.command import _AS_TYPED, Command, Group, print_json
from ragcache_core.cli.commands.simulate import run as simulate
from ragcache_core.errors import EmptyStoreError


def invoke(raises: BaseException, *arguments: str) -> tuple[int, str, str]:
    """Run a command that raises; return its exit status, standard output and standard error."""

    @click.group(cls=Group)
    def group() -> None: ...

    @group.command(cls=Command)
    def fail(as_json: bool) -> None:
        raise raises

    @group.command(cls=Command)
    def other(as_json: bool) -> None: ...

    result = CliRunner().invoke(group, ["fail", *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_the_help_says_of_every_command_in_a_whole_line_what_it_does() -> None:
    printed = CliRunner().invoke(cli, ["--help"]).stdout
    listed = printed.partition("Commands:\n")[2].partition("\n\n")[0].splitlines()
    assert [line.split()[0] for line in listed] == sorted(cli.commands)
    assert all(line.endswith(".") and not line.endswith("..") for line in listed)


def test_an_error_is_one_line_on_standard_error_and_status_1() -> None:
    assert invoke(EmptyStoreError("nothing there: add")) == (1, "", "ragcache: error: nothing there: add\n")


def test_json_errors_are_an_object_on_standard_output_as_well() -> None:
    status, out, err = invoke(EmptyStoreError("nothing there: add"), "--json")
    assert json.loads(out) == {"error": {"type": "EmptyStoreError", "message": "nothing there: add"}}
    assert (status, err) == (1, "ragcache: error: nothing there: add\n")


def test_json_is_utf8_even_where_a_file_name_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"name": "caf\u00e9 \udcff"})
    out = capsys.readouterr().out
    assert out == '{"name": "caf\u00e9 \\udcff"}\n'
    assert json.loads(out) == {"name": "caf\u00e9 \udcff"}


def test_a_reader_that_goes_away_is_no_error_of_ours() -> None:
    assert invoke(BrokenPipeError(32, "Broken pipe")) == (1, "", "")


def test_ctrl_c_is_status_130_and_sigterm_143() -> None:
    assert invoke(KeyboardInterrupt()) == (130, "", "ragcache: interrupted\n")
    before = signal.getsignal(signal.SIGTERM)

    @click.group(cls=Group)
    def group() -> None: ...

    @group.command(cls=Command)
    def wait(as_json: bool) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        pytest.fail("SIGTERM did not end the command")

    @group.command(cls=Command)
    def other(as_json: bool) -> None: ...

    assert CliRunner().invoke(group, ["wait"]).exit_code == 143
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("arguments", [["ask", "q", "--json"], ["nosuch", "--json"], ["stats", "--json", "--url"]])
def test_with_json_a_command_that_cannot_be_understood_reports_it_in_json_as_well(arguments: list[str]) -> None:
    result = CliRunner().invoke(cli, arguments)
    error = json.loads(result.stdout)["error"]
    assert result.exit_code == 2
    assert error["message"] in result.stderr


@pytest.mark.parametrize("command", ["index", "ask", "serve", "stats", "profile"])
def test_the_help_of_every_command_ends_with_examples_that_name_real_options(command: str) -> None:
    text = CliRunner().invoke(cli, [command, "--help"], terminal_width=100).stdout
    described, _, examples = text.partition("\nExamples:\n")
    lines = examples.strip().splitlines()
    assert len(lines) >= 2
    assert all(line.strip().startswith(f"ragcache {command} ") for line in lines)
    used = {flag for line in lines for flag in re.findall(r"(?<= )--[a-z-]+", line.split(" -- ")[0])}
    assert used
    assert all(re.search(rf"{flag}\b", described) for flag in used), used


@pytest.mark.parametrize("arguments", [["ask", "--help"], ["profile", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = f"""
import sys
import textwrap
sys.argv = ["ragcache", *{arguments!r}]
try:
    import runpy
    runpy.run_module("ragcache_core", run_name="__main__")
except SystemExit as exit:
    assert exit.code == 0, exit.code
heavy = {{"faiss", "torch", "vllm", "transformers", "sklearn", "openai", "numpy", "httpx"}} & set(sys.modules)
assert not heavy, heavy
"""
    root = Path(ragcache_core.__file__).parent.parent
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=False)
    assert run.returncode == 0, run.stderr
    assert "Usage:" in run.stdout


def test_every_hint_that_is_translated_is_still_one_of_the_librarys() -> None:
    root = Path(ragcache_core.__file__).parent
    sources = "".join(p.read_text() for p in root.rglob("*.py") if p.parent.name != "cli")
    joined = re.sub(r'"\n\s+f?"', "", sources)
    assert [phrase for phrase in _AS_TYPED if phrase not in joined] == []


def commands(group: click.Group) -> Iterator[click.Command]:
    for command in group.commands.values():
        if not isinstance(command, click.Group) or command.invoke_without_command:
            yield command
        if isinstance(command, click.Group):
            yield from commands(command)


@pytest.mark.parametrize("command", [*commands(cli), simulate], ids=lambda command: command.name)
def test_json_is_a_flag_and_a_file_that_is_written_is_output(command: click.Command) -> None:
    options = {name: param for param in command.params if isinstance(param, click.Option) for name in param.opts}
    assert options["--json"].is_flag
    assert "output" not in {param.name for name, param in options.items() if name != "--output"}
    assert "--output" not in options or not options["--output"].is_flag


def test_ctrl_c_while_the_commands_are_imported_is_no_traceback() -> None:
    code = """
        import sys

        class Interrupting:
            def find_spec(self, name, path, target=None):
                if name == "ragcache_core.cli.commands.serve":
                    raise KeyboardInterrupt

        sys.meta_path.insert(0, Interrupting())
        from ragcache_core.cli import main
        main()
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "ragcache: interrupted\n")
