"""``ragcache warm``: prefill documents by a forecast, and compare the forecast with the outcome."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ragcache_core.cli.command import Command, options_in_cli_wording, print_json
from ragcache_core.cli.options import FiniteRange, api_key_option, join_server, layout_of, open_store, read_size
from ragcache_core.cli.output import check_output, output_option, printable, write_output
from ragcache_core.cli.warming import (
    check_expectation,
    expectation_options,
    lines_of,
    plan_of,
    plan_to_dict,
    read_expected,
    receipt_line,
    warm_engine,
)
from ragcache_core.errors import ConfigError, EngineDiedError, EngineTimeoutError, EngineUnreachableError

if TYPE_CHECKING:
    from ragcache_core.client import Engine
    from ragcache_core.stats import EngineStats

_WAIT_READY_S = 1800.0
_RETRY_S = 1.0
_FORMAT = 1
_HIT_COUNTS = ("num_requests", "num_prefix_query_tokens", "num_hit_tokens", "num_first_tokens", "sum_ttft_s")


@click.command(
    cls=Command,
    short_help="Prefill documents that are likely to be retrieved.",
    examples=[
        "ragcache warm --store notes.store --url http://127.0.0.1:8000 --from-log questions.txt",
        "ragcache warm --store notes.store --url http://127.0.0.1:8000 --trace mine.jsonl --budget 20GiB",
        "ragcache warm --store notes.store --url http://127.0.0.1:8000 --top 500 --wait-ready --output warmed.json",
        "ragcache warm --report warmed.json --url http://127.0.0.1:8000     (some hours later)",
    ],
)
@click.option("--store", type=click.Path(path_type=Path), metavar="PATH", help="Directory of the document store.")
@click.option("--url", required=True, metavar="URL", help="Address of the server, as 'ragcache serve' prints it.")
@api_key_option
@expectation_options
@click.option(
    "--budget", callback=lambda *given: None if given[2] is None else read_size(*given), metavar="SIZE",
    help="Maximum size of the KV to prefill, such as 20GiB. [default: the size of the largest "
"tier]",
)  # fmt: skip
@click.option(
    "--wait-ready",
    "wait_s",
    type=FiniteRange(min=0),
    is_flag=False,
    flag_value=_WAIT_READY_S,
    metavar="[SECONDS]",
    help=f"Wait for a server that does not answer yet. [without a number: {_WAIT_READY_S:g}]",
)
@click.option(
    "--dry-run", is_flag=True, help="Print what would be prefilled, and the forecast gain, without prefilling it."
)
@output_option("Write plan, forecast and result to this JSON file, for --report.")
@click.option(
    "--report",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Compare the forecast in FILE, the --output of an earlier run, with the hits since then. Prefills nothing.",
)
def warm(
    store: Path | None,
    url: str,
    api_key: str | None,
    report: Path | None,
    output: Path | None,
    wait_s: float | None,
    as_json: bool,
    **settings: Any,
) -> None:
    """Prefill likely documents of a store on the server at URL, while it is idle.

    The prefixes (documents in prompt order) with the largest savings within the budget are picked, from questions, from
    a trace, or by the distances of documents in the store. A simulation forecasts the gain: it picks from the first
    half of the requests alone, and replays the second half. Prefixes rank by their expected uses, so that they are not
    evicted first. Cached prefixes are skipped: run it again after an interruption. Requests of users go first.

    Exit status 0 means that all is cached: with --wait-ready it may gate a readiness probe.
    """
    if report is not None:
        _compare(report, url, api_key, as_json=as_json)
        return
    if store is None:
        raise click.UsageError("Give --store, whose documents are prefilled; or --report with an earlier --output.")
    check_expectation(settings)
    check_output("--output", output, filter(None, (settings["from_log"], settings["trace"])))
    with open_store(store, settings["embedder"], read_only=True) as documents:
        expected, layout = read_expected(documents, settings), layout_of(settings)
        with _joined(url, api_key, wait_s) as engine, options_in_cli_wording(warm):
            plan = plan_of(engine, documents, expected, layout, settings["budget"], settings["cost_model"])
            report_data = {**_facts(engine, store), **plan_to_dict(plan, expected)}
            if not as_json:
                click.echo("\n".join(lines_of(plan, expected)))
            if not settings["dry_run"]:
                receipt = warm_engine(engine, plan)
                report_data |= {"receipt": receipt.to_dict(), **_read_counts(engine.stats())}
                if not as_json:
                    click.echo(receipt_line(receipt, plan))
    write_output(report_data, output)
    if as_json:
        print_json(report_data)


def _joined(url: str, api_key: str | None, wait_s: float | None) -> Engine:
    """Return the engine at ``url`` when it answers."""
    from ragcache_core.client import Engine

    until_s = time.monotonic() + (wait_s or 0.0)
    while True:
        try:
            return Engine.connect(url, api_key=api_key)
        except (EngineUnreachableError, EngineDiedError, EngineTimeoutError):
            if time.monotonic() >= until_s:
                raise
            time.sleep(_RETRY_S)


def _facts(engine: Engine, store: Path) -> dict[str, object]:
    return {
        "format": _FORMAT,
        "time": datetime.now().astimezone().isoformat(timespec="seconds"),
        "url": engine.base_url,
        "model": engine.model,
        "store": str(store),
    }


# What came of it


def _counted(stats: EngineStats) -> dict[str, float]:
    counts: dict[str, float] = {name: getattr(stats, name) for name in _HIT_COUNTS if name != "num_hit_tokens"}
    return {**counts, "num_hit_tokens": sum(tier.num_hit_tokens for tier in stats.tiers)}


def _read_counts(stats: EngineStats) -> dict[str, object]:
    """Return an engine's present counts, including those of the most used documents."""
    return {"counted": _counted(stats), "uses": {use.doc_id: use.frequency for use in stats.hottest_documents}}


def _compare(path: Path, url: str, api_key: str | None, *, as_json: bool) -> None:
    """Print the forecast of an earlier run with the engine's counts since then."""
    report_data = _read_report(path)
    with join_server(url, api_key) as engine:
        stats = engine.stats()
    now, before = _counted(stats), report_data["counted"]
    has_restarted = any(now[name] < before.get(name, 0) for name in _HIT_COUNTS)
    since = {name: count - (0 if has_restarted else before.get(name, 0)) for name, count in now.items()}
    num_requests = int(since["num_requests"])
    achieved = {
        "num_requests": num_requests,
        "cached_share": since["num_hit_tokens"] / since["num_prefix_query_tokens"]
        if since["num_prefix_query_tokens"]
        else 0.0,
        "mean_ttft_s": since["sum_ttft_s"] / since["num_first_tokens"] if since["num_first_tokens"] else None,
        "has_restarted": has_restarted,
    }
    expected: dict[str, int] = {}
    for each in report_data["paths"]:
        expected[each["doc_ids"][-1]] = expected.get(each["doc_ids"][-1], 0) + each["expected_uses"]
    uses_before = {} if has_restarted else report_data.get("uses", {})
    documents = [
        {
            "doc_id": use.doc_id,
            "expected_uses": expected.get(use.doc_id, 0),
            "uses": round(1000 * (use.frequency - uses_before.get(use.doc_id, 0)) / max(num_requests, 1)),
            "tiers": list(use.tiers),
        }
        for use in stats.hottest_documents
    ]
    if as_json:
        print_json({"forecast": report_data["forecast"], "achieved": achieved, "hottest_documents": documents})
        return
    click.echo("\n".join(_compared(report_data["forecast"], achieved, documents)))


def _compared(
    forecast: Mapping[str, Any] | None, achieved: Mapping[str, Any], documents: Iterable[Mapping[str, Any]]
) -> list[str]:
    rows = [("achieved", achieved["num_requests"], achieved)]
    if forecast is not None:
        rows[:0] = [(f"forecast, {name}", forecast["num_requests"], forecast[name]) for name in ("warm", "cold")]
    lines = [f"{'':<18}{'requests':>10}{'prompts cached':>16}{'mean TTFT':>12}"]
    for name, num_requests, start in rows:
        ttft = "-" if start["mean_ttft_s"] is None else f"{start['mean_ttft_s']:.3f} s"
        lines.append(f"{name:<18}{num_requests:>10,}{start['cached_share']:>16.0%}{ttft:>12}")
    if achieved["has_restarted"]:
        lines.append("the engine has reset its counters since the warming: earlier counts are missing here")
    uses = [
        f"{printable(each['doc_id']):<40}{each['expected_uses']:>10}{each['uses']:>8}  {', '.join(each['tiers'])}"
        for each in documents
    ]
    head = f"{'hottest documents, uses in 1,000 requests':<40}{'forecast':>10}{'were':>8}  in"
    return [*lines, *([head, *uses] if uses else [])]


def _read_report(path: Path) -> dict[str, Any]:
    cure = "name a file that 'ragcache warm --output' wrote when it was done"
    try:
        report_data = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"--report {path} cannot be read ({error.strerror}): {cure}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--report {path} is not JSON ({error}): {cure}") from error
    match report_data:
        case {"format": 1, "forecast": dict() | None, "paths": list(), "counted": dict()}:
            return dict(report_data)
    raise ConfigError(f"--report {path} is not the --output of a finished 'ragcache warm': {cure}")
