"""The steps of ``ragcache warm`` and ``ragcache index --warm``: expectation, plan, prefill."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import click

from ragcache_core.cli.options import embedder_option, layout_options, together
from ragcache_core.cli.output import counting_requests
from ragcache_core.errors import ConfigError, EmptyStoreError, RAGCacheError, TraceError
from ragcache_core.prompt import PromptLayout
from ragcache_core.types import DocId, Document

if TYPE_CHECKING:
    from ragcache_core.client import Engine
    from ragcache_core.client.warming import WarmingReceipt
    from ragcache_core.retrieval import DocumentStore
    from ragcache_core.retrieval.reader import StoreReader
    from ragcache_core.sim.options import SimulationOptions
    from ragcache_core.sim.traces.trace import Trace, TracedRequest
    from ragcache_core.sim.warming import Forecast, WarmPath
    from ragcache_core.stats import EngineStats


_MAX_SAMPLED_DOCUMENTS: Final = 2_000
"""Number of evenly spaced documents used as queries: a search takes about a millisecond."""
_QUESTION_CHARS: Final = 200


def retrieved_for(store: StoreReader, questions: Sequence[str], k: int) -> list[tuple[DocId, ...]]:
    """Return the documents that the store's search finds for each question.

    Raises:
        SearchError, EmptyStoreError
    """
    found = []
    with counting_requests("searching", len(questions)) as progress:
        for question in questions:
            found.append(tuple(document.doc_id for document in store.search(question, k).documents))
            progress(1)
    return found


def retrieved_by_popularity(store: StoreReader, k: int) -> list[tuple[DocId, ...]]:
    """Return the documents found for the beginning of each stored document, without itself.

    It stands in for unknown questions: a document similar to many others is found often.

    Raises:
        EmptyStoreError: there is no document.
    """
    ids = store.ids()
    if not ids:
        raise EmptyStoreError(f"{store.path} is empty: index documents before they are warmed")
    found = []
    sampled = ids[:: -(-len(ids) // _MAX_SAMPLED_DOCUMENTS)]
    with counting_requests("searching", len(sampled)) as progress:
        for document in store.get(sampled):
            near = store.search(_beginning(document), k + 1).documents
            others = tuple(other.doc_id for other in near if other.doc_id != document.doc_id)
            found.append(others[:k] or (document.doc_id,))
            progress(1)
    return found


def most_retrieved(requests: Iterable[TracedRequest], num_documents: int) -> list[TracedRequest]:
    """Return each request up to its first document that is not among the ``num_documents`` most found."""
    requests = list(requests)
    counts = Counter(doc_id for request in requests for doc_id in request.doc_ids)
    top = {doc_id for doc_id, _ in counts.most_common(num_documents)}
    lengths = [len(up_to_unknown(request.doc_ids, top.__contains__)) for request in requests]
    pairs = zip(requests, lengths, strict=True)
    return [replace(each, doc_ids=each.doc_ids[:num], doc_tokens=each.doc_tokens[:num]) for each, num in pairs]


def up_to_unknown(ids: tuple[DocId, ...], is_known: Callable[[DocId], bool]) -> tuple[DocId, ...]:
    """Return the ids before the first unknown one."""
    return ids[: next((i for i, doc_id in enumerate(ids) if not is_known(doc_id)), len(ids))]


def _beginning(document: Document) -> str:
    title = document.metadata.get("title")
    return title if isinstance(title, str) and title.strip() else document.text[:_QUESTION_CHARS]


DEFAULT_COST_MODEL = "a10g-mistral-7b"
_DEFAULT_K = 2
_REUSED = 0.3
"""Recomputed share of a reused chunk in a forecast, as in ``ragcache advise``."""
_QUESTION_TOKENS = 32
_APART_S = 10.0  # between requests whose times are unknown

Order = Literal["retrieval", "canonical"]
expectation_options = together(
    click.option(
        "--from-log",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Log of questions: plain text with one per line, or JSON lines. The store's search finds their documents.",
    ),
    click.option(
        "--trace",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Log of retrieved documents: a trace of 'ragcache serve --record-trace', or a log that "
        "'ragcache trace import' reads.",
    ),
    click.option(
        "--top",
        type=click.IntRange(1),
        metavar="N",
        help="Without a log: only the N documents that are similar to most others. [default: all documents]",
    ),
    click.option(
        "-k", "--k", type=click.IntRange(1), help="Documents per prompt. [default: 2, or fewer if the store has fewer]"
    ),
    click.option(
        "--document-order",
        type=click.Choice(["retrieval", "canonical"]),
        default="retrieval",
        show_default=True,
        help="Document order of your prompts.",
    ),
    layout_options,
    embedder_option,
    click.option(
        "--cost-model",
        default=DEFAULT_COST_MODEL,
        show_default=True,
        metavar="NAME|FILE",
        help="Prefill times that the forecast assumes: a name or a file, as for 'ragcache advise'.",
    ),
)
"""Options for expected requests (:func:`read_expected`), the prompt layout and the cost model."""


def check_expectation(settings: Mapping[str, Any]) -> None:
    """Refuse more than one source of expected requests, and a cost model that is not there.

    Raises:
        click.UsageError: with the sources that were given. ConfigError: the cost model cannot be read.
    """
    from ragcache_core.sim.testbeds import load_testbed

    load_testbed(settings["cost_model"])
    sources = [name for name in ("from_log", "trace", "top") if settings[name] is not None]
    if len(sources) > 1:
        names = " and ".join(f"--{name.replace('_', '-')}" for name in sources)
        raise click.UsageError(f"{names} exclude each other: give one of them.")


@dataclass(frozen=True, slots=True)
class Expected:
    """Expected retrievals: times, documents in prompt order, and question lengths.

    ``source`` says where that is known from, ``num_unknown`` how many documents of it the store has not. Each of
    ``alone`` is picked as a prefix of its own as well, though no retrieval is known. With ``top`` only prefixes of that
    many documents are picked, those found most often.
    """

    source: str
    times_s: Sequence[float]
    documents: Sequence[tuple[DocId, ...]]
    questions: Sequence[str | int]
    num_unknown: int = 0
    alone: Sequence[DocId] = ()
    top: int | None = None


@dataclass(frozen=True, slots=True)
class WarmingPlan:
    """The documents and prefixes to prefill, and the forecast.

    Attributes:
        documents: by their ids.
        paths: documents in prompt order, the one with the largest savings per token first.
        num_tokens: of the paths.
        budget_tokens: the limit of ``num_tokens``.
        bytes_per_token: of KV.
        forecasts: for parts of the budget, the last for all; none if there are too few requests.
        cost_model: the name of the prefill's costs.
    """

    documents: Mapping[DocId, Document]
    paths: Sequence[WarmPath]
    num_tokens: int
    budget_tokens: int
    bytes_per_token: float
    forecasts: Sequence[Forecast]
    cost_model: str

    @property
    def forecast(self) -> Forecast | None:
        """The forecast for the whole budget."""
        return self.forecasts[-1] if self.forecasts else None


# What is expected


def expected_of(
    store: DocumentStore,
    from_log: Path | None = None,
    trace: Path | None = None,
    top: int | None = None,
    k: int | None = None,
    order: Order = "retrieval",
) -> Expected:
    """Return the expected retrievals from ``store``: of a log, of a trace, or by similarity of documents.

    Raises:
        TraceError: the file is empty, broken, or names no document. ConfigError: none that the store has.
        EmptyStoreError: the store has none.
    """
    from ragcache_core.ordering import arrange

    num_wanted = k or _DEFAULT_K
    if trace is not None:
        found = _expected_of_trace(store, trace)
    elif from_log is not None:
        from ragcache_core.sim.traces.log_import import read_questions

        timed_questions = read_questions(from_log)
        times_s, questions = zip(*timed_questions, strict=True)
        documents = retrieved_for(store, questions, num_wanted)
        found = Expected(f"{len(timed_questions):,} questions of {from_log.name}", times_s, documents, questions)
    else:
        documents = retrieved_by_popularity(store, num_wanted)
        documents = [*documents[::2], *documents[1::2]]  # a forecast's halves are both of the whole corpus
        num = len(documents)
        source = "similarity between stored documents" + (f", limited to the {top:,} found most often" if top else "")
        found = Expected(source, [_APART_S * i for i in range(num)], documents, [_QUESTION_TOKENS] * num, top=top)
    shown = [tuple(ids[i] for i in arrange(ids, order, None)) for ids in found.documents]
    return replace(found, documents=shown)


def read_expected(store: DocumentStore, settings: Mapping[str, Any]) -> Expected:
    """Return what the options of :func:`expectation_options` say; see :func:`expected_of`."""
    names = ("from_log", "trace", "top", "k", "document_order")
    return expected_of(store, *(settings[name] for name in names))


def _expected_of_trace(store: DocumentStore, path: Path) -> Expected:
    trace = _read_trace(path)
    known = set(store.ids()).intersection(trace.doc_ids)
    if not len(trace.docs):
        raise TraceError("none of its requests retrieves a document, so there is nothing to prefill", path)
    if not known:
        raise ConfigError(
            f"none of the {len(trace.doc_ids):,} documents of {path} is in {store.path}, {trace.doc_ids[0]!r:.60} for "
            "one: name the --store whose documents were retrieved"
        )
    requests = list(trace)
    return Expected(
        f"{len(trace):,} requests of {path.name}",
        trace.arrival_s.tolist(),
        [up_to_unknown(request.doc_ids, known.__contains__) for request in requests],
        [request.question_tokens for request in requests],
        len(set(trace.doc_ids) - known),
    )


def _read_trace(path: Path) -> Trace:
    """Return a trace, or the trace of a log."""
    from ragcache_core.sim.traces.log_import import Assumptions, import_log
    from ragcache_core.sim.traces.trace import read_trace

    try:
        return read_trace(path)
    except TraceError as error:
        try:
            return import_log(path, Assumptions(mean_tokens=1)).trace  # the store knows the lengths
        except TraceError:
            raise error from None


# What is picked


def plan_of(
    engine: Engine,
    store: DocumentStore,
    expected: Expected,
    layout: PromptLayout,
    budget_bytes: int | None,
    cost_model: str,
    num_forecasts: int = 1,
) -> WarmingPlan:
    """Return the plan of what an engine prefills of ``expected``, with the layout bound to it.

    Args:
        engine: its tiers limit the budget, unless it has a shared store without a limit.
        store: has the documents.
        expected: requests that are expected.
        layout: of prompts.
        budget_bytes: KV to prefill at most; by default the size of the largest tier.
        cost_model: of prefills, in the forecast.
        num_forecasts: forecasts, each for half of the tokens of the next.

    Raises:
        ConfigError: the budget is more than the tiers hold, or less than any document needs.
        EngineError, TokenizerUnavailableError
    """
    from ragcache_core.client.profiling import tier_sizes
    from ragcache_core.sim.testbeds import load_testbed
    from ragcache_core.sim.traces.trace import Trace, TracedRequest
    from ragcache_core.sim.warming import LEAST_REQUESTS, NUM_FIRST, forecast_later, pick_paths
    from ragcache_core.types import SegmentKind

    testbed = load_testbed(cost_model)
    stats, sizes = engine.stats(), tier_sizes(engine)
    chunks = stats.chunks
    room = dict(sizes.tokens)
    if chunks is not None:
        room = {"reused chunks": chunks.capacity_tokens + chunks.disk_capacity_tokens}
    budget_tokens = max(room.values()) if budget_bytes is None else int(budget_bytes / sizes.bytes_per_token)
    is_unlimited = chunks is None and any(tier.name == "shared" and not tier.capacity_bytes for tier in stats.tiers)
    if budget_tokens > sum(room.values()) and not is_unlimited:
        holds = ", ".join(f"{name} {size_text(n * sizes.bytes_per_token)}" for name, n in room.items())
        raise ConfigError(
            f"budget is {size_text(budget_tokens * sizes.bytes_per_token)}, the tiers hold {holds}: lower it, or give "
            "the engine more host memory or disk"
        )
    bound = engine.bind_prompt(layout)
    tokenizer = engine.tokenizer
    wanted = sorted({doc_id for ids in expected.documents for doc_id in ids}.union(expected.alone))
    documents = dict(zip(wanted, store.get(wanted), strict=True))
    with counting_requests("tokenising", len(documents)) as progress:
        lengths: dict[DocId, int] = {}
        for doc_id, document in documents.items():
            lengths[doc_id] = max(len(tokenizer.encode(layout.document_text(document)).token_ids), 1)
            progress(1)
    prefix = next((bound.prefix([d], [d]) for d in documents.values()), None)
    segments = () if prefix is None else prefix.segments
    system_tokens = next((segment.start for segment in segments if segment.kind is SegmentKind.DOCUMENT), 0)
    trace = Trace.from_requests(
        TracedRequest(time_s, ids, tuple(lengths[i] for i in ids), _question_tokens(question), 1)
        for time_s, ids, question in zip(expected.times_s, expected.documents, expected.questions, strict=True)
    )
    alone = [TracedRequest(expected.times_s[-1], (i,), (lengths[i],), _QUESTION_TOKENS, 1) for i in expected.alone]

    def pick(asked: Trace) -> list[WarmPath]:
        known = Trace.from_requests([*(most_retrieved(asked, expected.top) if expected.top else asked), *alone])
        return pick_paths(known, budget_tokens, testbed.cost, system_tokens=system_tokens, anywhere=chunks is not None)

    paths = pick(trace)
    if not paths:
        least = system_tokens + min(lengths.values(), default=0)
        raise ConfigError(
            f"budget is {size_text(budget_tokens * sizes.bytes_per_token)}, and the smallest prefix "
            f"takes {size_text(least * sizes.bytes_per_token)}: raise it"
        )
    below_tokens = sizes.tokens.get("disk", 0) + (budget_tokens if is_unlimited else sizes.tokens.get("shared", 0))
    options = _simulated(stats, {**sizes.tokens, "disk": below_tokens}, system_tokens, cost_model)
    num_later = len(trace) - len(trace) // 2 if len(trace) >= LEAST_REQUESTS else 0
    with counting_requests("simulating", num_forecasts * 2 * min(num_later, NUM_FIRST)) as progress:
        forecasts = forecast_later(trace, options, pick, num_parts=num_forecasts, progress=progress)
    num_tokens = system_tokens + sum(path.doc_tokens[-1] for path in paths)
    return WarmingPlan(documents, paths, num_tokens, budget_tokens, sizes.bytes_per_token, forecasts, testbed.name)


def _question_tokens(question: str | int) -> int:
    from ragcache_core.sim.traces.log_formats import estimated_tokens

    return question if isinstance(question, int) else estimated_tokens(question) or 0


def _simulated(stats: EngineStats, tokens: Mapping[str, int], system_tokens: int, cost_model: str) -> SimulationOptions:
    """Return the simulation options of an engine with such tiers."""
    from ragcache_core.policy import POLICIES
    from ragcache_core.sim.options import SimulationOptions

    host = tokens.get("host", 0)
    given: dict[str, Any] = {}
    if stats.chunks is not None and (num_chunk := stats.chunks.capacity_tokens):
        given = {"chunk_reuse": _REUSED, "chunk_share": num_chunk / (host + num_chunk)}
        host += num_chunk
    return SimulationOptions(
        policy=stats.policy if stats.policy in POLICIES else "mixture",
        gpu_tokens=tokens["gpu"],
        host_tokens=host,
        disk_tokens=tokens.get("disk", 0) if host else 0,
        system_tokens=system_tokens,
        cost_model=cost_model,
        max_batch=8,
        **given,
    )


# What is done


def warm_store(store: DocumentStore, url: str, api_key: str | None) -> tuple[dict[str, object], list[str]]:
    """Prefill documents of ``store`` by similarity on the server at ``url``; return the receipt, and its text.

    Raises:
        ConfigError, EngineError
    """
    from ragcache_core.client import Engine

    expected = expected_of(store)
    with Engine.connect(url, api_key=api_key) as engine:
        plan = plan_of(engine, store, expected, PromptLayout(), None, DEFAULT_COST_MODEL)
        receipt = warm_engine(engine, plan)
    report = {"url": url, **plan_to_dict(plan, expected), "receipt": receipt.to_dict()}
    return report, [*lines_of(plan, expected), receipt_line(receipt, plan)]


def warm_engine(
    engine: Engine, plan: WarmingPlan, on_path: Callable[[WarmingReceipt], object] = lambda _: None
) -> WarmingReceipt:
    """Prefill the plan; an early end reports the receipt so far.

    ``on_path`` is called after each path.

    Raises:
        EngineError: the engine went away, or cannot be warmed. KeyboardInterrupt
    """
    from ragcache_core.client.warming import WarmingReceipt

    receipt = WarmingReceipt()
    with counting_requests("warming", len(plan.paths)) as progress:

        def count(done: WarmingReceipt) -> None:
            nonlocal receipt
            receipt = done
            progress(1)
            on_path(done)

        paths = [([plan.documents[i] for i in path.doc_ids], path.expected_uses) for path in plan.paths]
        try:
            return engine.warm_paths(paths, on_path=count)
        except KeyboardInterrupt:
            click.echo(f"ragcache: {_so_far(receipt, plan)}", err=True)
            raise
        except RAGCacheError as error:
            if not receipt.num_done:
                raise
            raise type(error)(f"{_so_far(receipt, plan)} ({error})") from error


def _so_far(receipt: WarmingReceipt, plan: WarmingPlan) -> str:
    return (
        f"{receipt.num_done:,} of {len(plan.paths):,} paths are done, {receipt.num_warmed:,} of them prefilled now: "
        "run it again to go on"
    )


def lines_of(plan: WarmingPlan, expected: Expected) -> list[str]:
    """Return a plan as text."""
    num_documents = len({path.doc_ids[-1] for path in plan.paths})
    lines = [
        f"picked {len(plan.paths):,} paths of {num_documents:,} documents by {expected.source}: {plan.num_tokens:,} "
        f"tokens, {size_text(plan.num_tokens * plan.bytes_per_token)} of "
        f"{size_text(plan.budget_tokens * plan.bytes_per_token)}",
        _forecast_line(plan, len(expected.documents)),
    ]
    if expected.num_unknown:
        lines.append(f"{expected.num_unknown:,} documents are not in the store: documents after them are left out")
    return lines


def _forecast_line(plan: WarmingPlan, num_requests: int) -> str:
    if plan.forecast is None:
        return f"no forecast: {num_requests} requests are too few to pick from the first half and replay the second"
    cold, warmed = plan.forecast.cold, plan.forecast.warm
    return (
        f"forecast, picked from {num_requests // 2:,} requests, for the next {plan.forecast.num_requests:,}: "
        f"{warmed.cached_share:.0%} of their prompts cached instead of {cold.cached_share:.0%}, mean TTFT "
        f"{warmed.mean_ttft_s:.3f} s instead of {cold.mean_ttft_s:.3f} s (costs of {plan.cost_model})"
    )


def receipt_line(receipt: WarmingReceipt, plan: WarmingPlan) -> str:
    """Return a receipt as text."""
    left_out = f", {receipt.num_left_out:,} left out that do not fit the context window" * bool(receipt.num_left_out)
    return (
        f"warmed {receipt.num_warmed:,} paths ({receipt.num_tokens:,} tokens, "
        f"{size_text(receipt.num_tokens * plan.bytes_per_token)}) in {receipt.duration_s:.1f} s, "
        f"{receipt.num_cached:,} were cached already{left_out}"
    )


def plan_to_dict(plan: WarmingPlan, expected: Expected) -> dict[str, object]:
    """Return plain JSON data."""
    return {
        "source": expected.source,
        "num_requests": len(expected.documents),
        "num_unknown": expected.num_unknown,
        "budget_bytes": round(plan.budget_tokens * plan.bytes_per_token),
        "num_bytes": round(plan.num_tokens * plan.bytes_per_token),
        "num_tokens": plan.num_tokens,
        "cost_model": plan.cost_model,
        "forecast": None if plan.forecast is None else plan.forecast.to_dict(),
        "paths": [path.to_dict() for path in plan.paths],
    }


def size_text(num_bytes: float) -> str:
    """Return a size as text."""
    unit, name = (1 << 30, "GiB") if num_bytes >= 1 << 30 else (1 << 20, "MiB")
    return f"{num_bytes / unit:.1f} {name}"
