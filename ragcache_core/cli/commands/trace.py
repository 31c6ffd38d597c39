"""``ragcache trace``: make a trace of requests, import one from a log, show its statistics."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from ragcache_core.cli.command import Command, Group, print_json
from ragcache_core.cli.output import check_no_input, check_outputs, check_plot, counting_requests, say_written
from ragcache_core.errors import ConfigError

if TYPE_CHECKING:
    from ragcache_core.reports.page import Report, Table
    from ragcache_core.sim.traces.reuse import TraceReuse, TraceSummary
    from ragcache_core.sim.traces.trace import Trace


_UNITS = ((86_400, "day"), (3_600, "hour"), (60, "minute"), (1, "second"))


def reuse_tables(reuse: TraceReuse) -> list[Table]:
    """Return the tables of ``reuse``, without empty ones."""
    from ragcache_core.reports.page import Table

    tables = []
    lengths = {"a prompt": reuse.prompt_tokens, "a document": reuse.document_tokens, "an answer": reuse.output_tokens}
    rows = [(name, *(f"{value:,.0f}" for _, value in of)) for name, of in lengths.items() if of]
    tables.append(Table("Tokens", ("quantile", *(f"{q:.0%}" for q, _ in reuse.prompt_tokens)), rows, 1))
    shares = [(name, f"{share:.1%}") for name, share in reuse.shares_of_prompts.items()]
    tables.append(Table("Of all prompts", ("part", "tokens"), shares, 1))
    if not reuse.top_documents:
        return tables
    tops = [(f"{top:.0%}", f"{share:.1%}") for top, share in reuse.top_documents]
    tables.append(Table("Popularity", ("top documents", "of retrievals"), tops, 1))
    within = [(_duration(seconds), f"{share:.1%}") for seconds, share in reuse.returns_within_s]
    tables.append(Table("Retrieved again", ("within", "of retrievals"), within, 1))
    by_position = [
        (str(one.position), f"{one.num_retrievals:,}", f"{one.anywhere:.1%}", f"{one.same_prefix:.1%}")
        for one in reuse.positions
    ]
    by_position.append(("all, by tokens", "", f"{reuse.anywhere_tokens:.1%}", f"{reuse.same_prefix_tokens:.1%}"))
    tables.append(Table("Recurrence", ("position", "retrievals", "anywhere", "behind the same"), by_position, 1))
    known = [(f"{share:.0%}", f"{of:.1%}") for share, of in reuse.known_documents]
    tables.append(Table("Share of documents retrieved before", ("at least", "of requests"), known, 1))
    sources = [(str(number), f"{share:.1%}") for number, share in reuse.sources]
    if sources:
        tables.append(
            Table(
                "Requests whose documents were all retrieved before, most recently in",
                ("requests", "share"),
                sources,
                1,
            )
        )
    together = [("pairs of documents", f"{reuse.repeated_pairs:.1%}"), ("whole sets", f"{reuse.repeated_sets:.1%}")]
    tables.append(Table("Recurring combinations", ("what", "share"), together, 1))
    return tables


def reuse_report(name: str, summary: TraceSummary, reuse: TraceReuse) -> Report:
    """Return the tables with plots, titled by the trace's file ``name``."""
    from ragcache_core.reports.page import Report
    from ragcache_core.reports.plots import lines

    plots = []
    if reuse.top_documents:
        plots = [
            lines(
                "Popularity", "most popular, %", "share of retrievals",
                {
                    "documents": _percent(reuse.top_documents),
                    **({"sets of documents": _percent(reuse.top_sets)} if reuse.top_sets else {}),
                },
                log_x=True,
            ),
            lines(
                "Known documents", "at least this share of a request's documents came before, %", "share of requests",
                {"requests": _percent(reuse.known_documents)},
            ),
            lines(
                "Reuse by time", "seconds since the document's last retrieval", "share of retrievals",
                {"retrieved again within": reuse.returns_within_s}, log_x=True,
            ),
            lines(
                "Reuse by position", "position in the prompt", "share that comes again",
                {
                    "anywhere": [(one.position, one.anywhere) for one in reuse.positions],
                    "behind the same documents": [(one.position, one.same_prefix) for one in reuse.positions],
                },
            ),
        ]  # fmt: skip
    plots.append(
        lines(
            "Lengths", "tokens", "share of at most as many",
            {
                part: [(max(tokens, 1.0), share) for share, tokens in of]
                for part, of in (("prompts", reuse.prompt_tokens), ("documents", reuse.document_tokens),
                                 ("answers", reuse.output_tokens))
                if of
            },
            log_x=True,
        )
    )  # fmt: skip
    lead = [
        f"{name}: {summary.num_requests:,} requests in {summary.duration_s:,.0f} s, {summary.num_documents:,} "
        f"documents retrieved {summary.num_retrievals:,} times."
    ]
    return Report("What comes again", lead, plots, reuse_tables(reuse))


def _percent(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(100 * x, y) for x, y in points]


def _duration(seconds: float) -> str:
    size, unit = next((size, unit) for size, unit in _UNITS if seconds >= size)
    count = round(seconds / size)
    return f"{count} {unit}{'s' if count > 1 else ''}"


WORKLOAD_NAMES = ("mmlu", "nq", "nq-small", "sysx", "drift", "conversation", "agents")
LOG_FORMATS = ("auto", "vllm", "langchain", "plain", "mooncake", "qwen", "ragpulse", "azure", "burst")
_STANDARD_OUTPUT = Path("-")
_output_option = click.option(
    "--output",
    type=click.Path(path_type=Path, allow_dash=True),
    default=_STANDARD_OUTPUT,
    metavar="FILE",
    help="Write the trace to this file; compressed if its name ends in .gz. [default: -, standard output]",
)


@click.group(cls=Group, short_help="Make, import or show a trace of requests.")
def trace() -> None:
    """Make, import and show traces: when requests come, and which documents each retrieves.

    'ragcache simulate' and 'ragcache bench' run them. A trace is a file of JSON lines, one request a line:

    \b
    {"t": 12.5, "docs": ["d17", "d3"], "doc_tokens": [1904, 655], "question_tokens": 31, "output_tokens": 1}
    """


@trace.command(
    cls=Command,
    short_help="Make a trace with the statistics of a published workload.",
    examples=[
        "ragcache trace make --workload mmlu --requests 15000 --seed 1 --output mmlu.jsonl",
        "ragcache trace make --workload nq --requests 1000000 --documents 300000 --seed 2 --output nq.jsonl.gz",
        "ragcache trace make --workload drift --requests 2880 --k 5 --rate 1.5 --seed 3 --output - | head",
    ],
)
@click.option(
    "--workload",
    type=click.Choice(WORKLOAD_NAMES),
    required=True,
    help="Workload whose published statistics the trace has.",
)
@click.option(
    "--requests", "num_requests", type=click.IntRange(1), required=True, metavar="N", help="Number of requests."
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Random seed.")
@_output_option
@click.option("--documents", "num_documents", type=int, metavar="N", help="Number of documents in the corpus.")
@click.option("--k", "documents_per_request", type=int, metavar="N", help="Documents retrieved per request.")
@click.option(
    "--rate",
    "requests_per_s",
    type=float,
    metavar="R",
    help="Mean arrival rate in requests per second (Poisson arrivals).",
)
@click.option("--skew", type=float, help="Exponent of document popularity: (rank + shift) ** -skew.")
@click.option("--shift", type=float, help="Shift of the rank in document popularity; see --skew.")
@click.option(
    "--mean-tokens",
    type=float,
    metavar="N",
    help="Mean document length in tokens, before it is clipped to --least-tokens and --most-tokens.",
)
@click.option("--sigma", type=float, help="Standard deviation of the logarithm of document lengths (lognormal).")
@click.option("--least-tokens", type=int, metavar="N", help="Minimum document length in tokens.")
@click.option("--most-tokens", type=int, metavar="N", help="Maximum document length in tokens.")
@click.option(
    "--length-correlation",
    type=float,
    metavar="R",
    help="Correlation of document length with popularity, -1 to 1; above 0 popular documents are longer.",
)
@click.option(
    "--primary-first", type=float, metavar="P", help="Share of requests whose best document comes first, 0 to 1."
)
@click.option(
    "--drift-every",
    type=int,
    metavar="N",
    help="Number of requests between two changes of popularity; 0 for no change.",
)
@click.option(
    "--drift-share",
    type=float,
    metavar="P",
    help="Share of the popular documents that change rank at each change, 0 to 1.",
)
@click.option(
    "--repeat-share",
    type=float,
    metavar="P",
    help="Share of requests about the topic of one of the last 40 requests, 0 to 1.",
)
@click.option(
    "--goes-on",
    type=float,
    metavar="P",
    help="Share of conversations with a second turn, 0 to 1; 0 makes single questions.",
)
@click.option(
    "--think-median-s", type=float, metavar="S", help="Median time between two turns of a conversation, in seconds."
)
@click.option("--question-median", type=float, metavar="N", help="Median question length in tokens.")
@click.option("--mean-output-tokens", type=float, metavar="N", help="Mean answer length in tokens.")
def make(
    workload: str, num_requests: int, seed: int, output: Path, as_json: bool, **changes: float | None
) -> None:  # fmt: skip
    """Make a trace with the published statistics of a workload; what is not given is as published.

    \b
    mmlu      30,000 documents, 3 % of those retrieved get about 60 % of the retrievals, answers of one token
    nq        100,000 documents, flatter, answers of 6 tokens on average
    nq-small  400 documents, flatter still
    sysx      a production system: 5 chunks a request, prompts of 1,000 to 20,000 tokens, median 3,300
    drift     mmlu with popularity that drifts and users who come back to their topics
    conversation  a production chat: turns that begin with their history, and documents of their own
    agents    loops of tool calls, with documents of their own; not after a published trace

    The same options give the same file, byte for byte, and a longer trace begins with the shorter.
    """
    from ragcache_core.sim.traces.workload import WORKLOADS, make_trace

    _check_output(output, as_json)
    given = {name: value for name, value in changes.items() if value is not None}
    try:
        chosen = replace(WORKLOADS[workload], **given)  # type: ignore[arg-type]
    except ConfigError as error:
        raise click.UsageError(_as_options(str(error))) from error
    with counting_requests("drawing", num_requests) as report:
        made = make_trace(chosen, num_requests, seed, progress=report)
    _write(made, output, as_json, {"workload": asdict(chosen), "seed": seed})


@trace.command(
    name="import",
    cls=Command,
    short_help="Convert a log or a published trace.",
    examples=[
        "ragcache trace import requests.jsonl --output mine.jsonl",
        "ragcache trace import runs.jsonl --format langchain --lengths tokens.json --output mine.jsonl",
        "ragcache trace import log.jsonl.gz --mean-tokens 800 --output mine.jsonl.gz",
        "ragcache trace import conversation_trace.jsonl --format mooncake --output mooncake.jsonl",
    ],
)
@click.argument("log", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "log_format",
    type=click.Choice(LOG_FORMATS),
    default="auto",
    show_default=True,
    help="Format of the log; auto uses the first line that identifies one.",
)
@_output_option
@click.option(
    "--lengths", type=click.Path(path_type=Path), metavar="FILE", help='Tokens of documents by id, as {"d17": 1904}.'
)
@click.option(
    "--mean-tokens",
    type=click.IntRange(1),
    metavar="N",
    help="Length in tokens of documents whose length the log does not have.",
)
@click.option(
    "--question-tokens",
    type=click.IntRange(0),
    default=32,
    show_default=True,
    help="Question length in tokens where the log has none.",
)
@click.option(
    "--output-tokens",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Answer length in tokens where the log has none.",
)
@click.option(
    "--speculative", is_flag=True, help="Also include speculative requests, which were sent before their search ended."
)
def import_(
    log: Path,
    log_format: str,
    output: Path,
    lengths: Path | None,
    mean_tokens: int | None,
    question_tokens: int,
    output_tokens: int,
    speculative: bool,
    as_json: bool,
) -> None:
    """Make a trace of LOG: a file of JSON lines, or of a published table.

    \b
    vllm       requests of a server, as a proxy logs them: bodies whose kv_transfer_params name documents
    langchain  runs, as a tracer or LangSmith exports them: those of retrievers, also inside other runs, and the length
               of the model's answer of the same trace
    plain      {"timestamp": "2026-01-31T12:00:00Z", "docs": ["d17", "d3"]}, and other fields of a trace's line

    \b
    mooncake   the traces of Mooncake (FAST 2025): blocks of 512 tokens by their hashes
    qwen       those of Qwen on Aliyun Bailian (ATC 2025): blocks of 16 tokens
    ragpulse   0_trace.jsonl of RAGPulse, beside the files with the lengths of its passages and web pages
    azure      Azure's of LLM inference 2023 and 2024: arrivals and lengths, nothing recurs
    burst      BurstGPT: the same

    A full block counts as a document, and the rest of the prompt as the question. If passages are named, all other text
    is the question. Requests are sorted, and the first arrives at 0. Other lines are skipped. If a log has texts and no
    lengths, 4 characters count as a token.
    """
    from ragcache_core.sim.traces.log_import import Assumptions, ImportedFormat, import_log, read_lengths

    _check_output(output, as_json)
    if output != _STANDARD_OUTPUT:
        check_no_input("--output", output, (log,) if lengths is None else (log, lengths))
    known = {} if lengths is None else read_lengths(lengths)
    assumed = Assumptions(known, mean_tokens, question_tokens, output_tokens, counts_speculative=speculative)
    imported = import_log(log, assumed, None if log_format == "auto" else cast("ImportedFormat", log_format))
    if imported.num_passed_over or imported.num_speculative:
        click.echo(
            f"ragcache: passed over: lines about something else {imported.num_passed_over:,}, "
            f"speculative requests {imported.num_speculative:,}",
            err=True,
        )
    if imported.num_estimated:
        click.echo(
            f"ragcache: {imported.num_estimated:,} lengths of documents are those of their texts, at 4 characters a "
            "token: give --lengths FILE for exact ones",
            err=True,
        )
    facts = {
        "num_estimated": imported.num_estimated,
        "format": imported.log_format,
        "num_passed_over": imported.num_passed_over,
    }
    _write(imported.trace, output, as_json, {**facts, "num_speculative": imported.num_speculative})


@trace.command(
    cls=Command,
    short_help="Show the statistics of a trace.",
    examples=[
        "ragcache trace show mmlu.jsonl",
        "ragcache trace show mmlu.jsonl --plot mmlu.html",
        "ragcache trace show mmlu.jsonl.gz --json",
    ],
)
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="OUT.png|.svg|.html",
    help="Write plots of how documents recur to this file.",
)
def show(file: Path, plot: Path | None, as_json: bool) -> None:
    """Show the statistics of the trace in FILE: size, lengths, and how documents recur.

    A document recurs 'anywhere' if an earlier request retrieved it, and 'behind the same' if that was after the same
    documents in the same order: an exact prefix cache can hit those, chunk reuse the others.
    """
    from ragcache_core.sim.traces.reuse import reuse_of, summarize
    from ragcache_core.sim.traces.trace import read_trace

    check_plot(plot)
    check_outputs({"--plot": plot}, (file,))
    read = read_trace(file)
    summary, reuse = summarize(read), reuse_of(read)
    if as_json:
        print_json({"trace": str(file), **_plain(summary), "reuse": asdict(reuse)})
    else:
        for name, value in _lines_of(summary):
            click.echo(f"{name:<20} {value}")
        for table in reuse_tables(reuse):
            click.echo(f"\n{table.text()}")
    if plot is not None:
        reuse_report(file.name, summary, reuse).save(plot)
        say_written(plot)


def _as_options(message: str) -> str:
    """Return an error of a workload in the words of the command line."""
    names = {str(option.name): option.opts[0] for option in make.params}
    return re.sub(r"\w+", lambda word: names.get(word[0], word[0]), message)


def _check_output(output: Path, as_json: bool) -> None:
    if as_json and output == _STANDARD_OUTPUT:
        raise click.UsageError("--json and '--output -' both want standard output: give --output FILE.")


def _write(made: Trace, output: Path, as_json: bool, facts: dict[str, object]) -> None:
    from ragcache_core.sim.traces.reuse import summarize
    from ragcache_core.sim.traces.trace import write_lines, write_trace

    if output == _STANDARD_OUTPUT:
        write_lines(made, sys.stdout.buffer)
        return
    with counting_requests("writing", len(made)) as report:
        write_trace(made, output, progress=report)
    if as_json:
        print_json({"output": str(output), **facts, "summary": _plain(summarize(made))})
    else:
        click.echo(f"{output}: {len(made):,} requests for {len(made.doc_ids):,} documents")


def _plain(summary: TraceSummary) -> dict[str, object]:
    return {name: None if value == float("inf") else value for name, value in asdict(summary).items()}


def _lines_of(summary: TraceSummary) -> Iterator[tuple[str, str]]:
    yield "requests", f"{summary.num_requests:,}"
    yield "duration", f"{summary.duration_s:,.1f} s, {summary.requests_per_s:.4g} requests a second"
    yield "documents", f"{summary.num_documents:,}, retrieved {summary.num_retrievals:,} times"
    yield "a request", f"{summary.documents_per_request:.3g} documents"
    yield "a document", f"{summary.mean_document_tokens:,.0f} tokens on average"
    prompt = f"{summary.median_prompt_tokens:,.0f} median, {summary.max_prompt_tokens:,} at most"
    yield "a prompt", f"{summary.mean_prompt_tokens:,.0f} tokens on average, {prompt}"
    yield "a question", f"{summary.mean_question_tokens:,.1f} tokens on average"
    yield "an answer", f"{summary.mean_output_tokens:,.1f} tokens on average"
    if summary.num_conversations:
        turns = f"{summary.turns_per_conversation:.3g} turns each, {summary.median_think_s:,.0f} s apart (median)"
        yield "conversations", f"{summary.num_conversations:,}, {turns}"
        yield "a history", f"{summary.history_share:.1%} of all prompts"
    yield "the top 3 %", f"{summary.top_share:.1%} of retrievals"
    yield "retrieved before", f"{summary.repeated_retrievals:.1%} of retrievals"
    yield "same prefix", f"{summary.repeated_prefix:.1%}: an infinite cache would hit those"
