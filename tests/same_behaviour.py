"""What must not change while the house is rebuilt: recorded once, and held against what is there now.

``python -m tests.same_behaviour record FILE`` before, ``python -m tests.same_behaviour check FILE`` after each step.
It holds the public names with their signatures, the command line's help pages, the figures of ``ragcache simulate`` for
three workloads and five policies, and the tests by their names, whichever file they have moved to.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
from click.testing import CliRunner

from ragcache_core.cli import cli

PACKAGES = (
    "ragcache_core",
    "ragcache_core.client",
    "ragcache_core.retrieval",
    "ragcache_integrations.langchain",
    "ragcache_integrations.llamaindex",
)
WORKLOADS = ("mmlu", "nq-small", "sysx")
POLICIES = ("pgdsf", "gdsf", "lru", "hybrid", "tournament")
NUM_REQUESTS = 1500
_BY_THE_CLOCK = re.compile(r"decision_s$")


def record() -> dict[str, Any]:
    """Return all of it."""
    return {
        "names": dict(_names()),
        "help": dict(_help_pages(cli, "ragcache")),
        "simulations": dict(_simulations()),
        "tests": sorted(_tests().elements()),
    }


def _names() -> Iterator[tuple[str, str]]:
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in sorted(module.__all__):
            value = getattr(module, name)
            yield f"{package}.{name}", _signature(value)
            if inspect.isclass(value):
                for member in sorted(vars(value)):
                    if not member.startswith(("_", "model_")):
                        yield f"{package}.{name}.{member}", _signature(getattr(value, member))


def _signature(value: object) -> str:
    if not callable(value):
        return type(value).__name__
    try:
        signature = str(inspect.signature(value))
    except (TypeError, ValueError):
        return "no signature"
    return re.sub(r"\bragcache_[\w.]+\.(\w+)|0x[0-9a-f]+", r"\1", signature)  # where a class lies may change


def _help_pages(command: click.Command, name: str) -> Iterator[tuple[str, str]]:
    yield name, CliRunner().invoke(command, ["--help"]).output
    if isinstance(command, click.Group):
        for part, inner in sorted(command.commands.items()):
            yield from _help_pages(inner, f"{name} {part}")


def _simulations() -> Iterator[tuple[str, Any]]:
    with TemporaryDirectory() as folder:
        for workload in WORKLOADS:
            trace = Path(folder) / f"{workload}.jsonl"
            _run("trace", "make", "--workload", workload, "--requests", str(NUM_REQUESTS), "--output", str(trace))
            for policy in POLICIES:
                said = json.loads(_run("simulate", str(trace), "--policy", policy, "--json"))
                yield f"{workload} {policy}", _without_clock({k: v for k, v in said.items() if k != "trace"})


def _run(*arguments: str) -> str:
    done = CliRunner().invoke(cli, arguments)
    if done.exit_code:
        raise SystemExit(f"ragcache {' '.join(arguments)}: {done.output}")
    return done.stdout


def _without_clock(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_clock(v) for k, v in value.items() if not _BY_THE_CLOCK.search(k)}
    return [_without_clock(v) for v in value] if isinstance(value, list) else value


def _tests() -> Counter[str]:
    collected = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests"], capture_output=True, text=True, check=True
    )
    ids = [line.partition("::")[2] for line in collected.stdout.splitlines() if "::" in line]
    return Counter(re.sub(r"\[[^\]]*[./][^\]]*\]", "[a file]", test) for test in ids)


def differences(before: Any, now: Any, place: str = "") -> Iterator[str]:
    """Say what was there and is not, is another, or is new, with its place."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted({*before, *now}, key=str):
            if key not in now:
                yield f"{place}{key}: gone"
            elif key not in before:
                yield f"{place}{key}: new"
            else:
                yield from differences(before[key], now[key], f"{place}{key}: ")
    elif place == "tests: ":
        gone, new = Counter(before) - Counter(now), Counter(now) - Counter(before)
        yield from (f"{place}{test}: gone" for test in sorted(gone.elements()))
        yield from (f"{place}{test}: new" for test in sorted(new.elements()))
    elif before != now:
        yield f"{place}{before!r:.200} is {now!r:.200}"


def main() -> None:
    """Record, or check."""
    match sys.argv[1:]:
        case ["record", path]:
            Path(path).write_text(json.dumps(record(), indent=1, sort_keys=True), encoding="utf-8")
        case ["check", path]:
            found = list(
                differences(json.loads(Path(path).read_text(encoding="utf-8")), json.loads(json.dumps(record())))
            )
            print("\n".join(found) or "nothing has changed")
            sys.exit(bool(found))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
