"""``ragcache batch``: answer a file of requests in the order with the fewest computed tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ragcache_core.batch_order import MAX_CONCURRENCY, PrefixKey, arrange_documents, order_requests
from ragcache_core.cli.batch_files import (
    CHAT_URL,
    AnswerFile,
    BatchLine,
    BrokenLine,
    digest_of,
    read_batch,
    reasons,
    to_record,
)
from ragcache_core.cli.command import EXIT_ERROR, Command, print_json
from ragcache_core.cli.commands.ask import DEFAULT_MAX_TOKENS
from ragcache_core.cli.options import (
    EmbedderName,
    embedder_option,
    engine_opener,
    engine_options,
    k_option,
    layout_of,
    layout_options,
    open_store,
    temperature_option,
    vllm_args_argument,
)
from ragcache_core.cli.output import check_output, counting_requests
from ragcache_core.errors import (
    ConfigError,
    EngineAuthError,
    EngineError,
    EngineHungError,
    EngineTimeoutError,
    PromptError,
    RequestRejectedError,
    SearchError,
    quoted,
)
from ragcache_core.ordering import DOCUMENT_ORDERS, DocumentOrder, arrange
from ragcache_core.prompt import ChatMessage, PromptLayout
from ragcache_core.types import DocId, Document

if TYPE_CHECKING:
    import httpx

    from ragcache_core.client import Engine
    from ragcache_core.retrieval import DocumentStore

_DEFAULT_K = 2
_FAILED = (RequestRejectedError, PromptError, ConfigError)
"""Errors of one request; others end the run."""
_CUT_OFF = ("abort", "error")
"""Finish reasons of answers that the server did not complete."""


@dataclass(slots=True)
class BatchSummary:
    """The result of a batch.

    Attributes:
        num_requests: lines of the input that are requests.
        num_earlier: requests that an earlier run answered.
        num_answered: requests that this run answered.
        num_failed: requests without an answer: a next run sends them again.
        num_broken: lines that are no requests.
        num_prompt_tokens: of this run's answers.
        num_cached_tokens: prompt tokens of these that the engine had cached.
        duration_s: seconds from the first request to the last answer.
    """

    num_requests: int
    num_earlier: int = 0
    num_answered: int = 0
    num_failed: int = 0
    num_broken: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    duration_s: float = 0.0

    def __str__(self) -> str:
        share = f" ({self.num_cached_tokens / self.num_prompt_tokens:.0%})" if self.num_prompt_tokens else ""
        return (
            f"{self.num_requests:,} requests: {self.num_answered:,} answered in {self.duration_s:.1f} s, "
            f"{self.num_earlier:,} earlier, {self.num_failed:,} failed; {self.num_prompt_tokens:,} prompt tokens, "
            f"{self.num_cached_tokens:,} of them cached{share}"
        )


@dataclass(frozen=True, slots=True)
class _Requests:
    """The requests of a batch with their documents in prompt order."""

    lines: Sequence[BatchLine]
    layout: PromptLayout
    settings: Mapping[str, Any]
    documents: Mapping[str, Sequence[Document]]
    order: DocumentOrder

    def messages(self, line: BatchLine) -> list[ChatMessage]:
        return self.layout.messages(self.documents[line.custom_id], str(line.question))

    def key(self, line: BatchLine, model: str) -> PrefixKey:
        """Return a request's sort key, of document ids, whose texts are equal in all prompts."""
        from ragcache_core.client.batch import chat_key

        if line.question is None:
            return chat_key(line.body["messages"], {"model": model, **line.body})
        return ("question", *(document.doc_id for document in self.documents[line.custom_id]), line.question)


@click.command(
    cls=Command,
    short_help="Answer a file of requests, ordered for the cache.",
    examples=[
        "ragcache batch questions.jsonl --store notes.store --output answers.jsonl --model examples/demo_model",
        "ragcache batch questions.jsonl --store notes.store --output answers.jsonl --url http://127.0.0.1:8000",
        "ragcache batch openai-batch.jsonl --output answers.jsonl --url http://127.0.0.1:8000 --json",
    ],
)
@click.argument("questions", type=click.Path(path_type=Path))
@click.option("--store", type=click.Path(path_type=Path), metavar="PATH", help="Directory of the document store.")
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    metavar="OUT",
    help="Write the answers to this file, in the format of OpenAI's batch output. An existing file "
    "of an interrupted run is continued.",
)
@engine_options
@embedder_option
@k_option
@click.option(
    "--max-tokens",
    type=click.IntRange(1),
    default=DEFAULT_MAX_TOKENS,
    show_default=True,
    help="Maximum length of an answer in tokens.",
)
@temperature_option
@layout_options
@click.option(
    "--document-order",
    type=click.Choice(DOCUMENT_ORDERS),
    default="retrieval",
    show_default=True,
    help="Document order in prompts. cache_aware puts documents first that most questions share; this changes prompts.",
)
@click.option(
    "--max-concurrency",
    type=click.IntRange(1),
    default=MAX_CONCURRENCY,
    show_default=True,
    metavar="N",
    help="Maximum number of requests in flight; after a crash at most N are repeated.",
)
@vllm_args_argument
def batch(
    questions: Path,
    store: Path | None,
    output: Path,
    embedder: EmbedderName | None,
    k: int | None,
    max_tokens: int,
    temperature: float,
    document_order: DocumentOrder,
    max_concurrency: int,
    vllm_args: tuple[str, ...],
    as_json: bool,
    **options: Any,
) -> None:
    """Answer the requests in the file QUESTIONS, one JSON object per line.

    A line is a question, {"question": "Where?", "id": "q1"}, whose documents are retrieved from the store; or a line of
    OpenAI's batch files for /v1/chat/completions, which is sent unchanged. All documents are retrieved first. Then
    requests that begin with the same documents are sent one after the other, so that a small cache computes these
    documents once. Prompts and answers stay the same, unless --document-order changes prompts.

    Each answer is written to OUT at once. Run the same command again to continue after an interruption, and to repeat
    failed requests. Exit status 1: a request failed or a line is invalid; all others are answered.
    """
    join = engine_opener(options, vllm_args)
    layout = layout_of(options)
    check_output("--output", output, [questions])
    lines, broken = read_batch(questions)
    has_questions = any(line.question is not None for line in lines)
    if has_questions and store is None:
        raise click.UsageError("Give --store: QUESTIONS holds questions, whose documents are retrieved.")
    if not has_questions and (store is not None or k is not None or document_order != "retrieval"):
        raise click.UsageError(
            "QUESTIONS holds prompts, and no questions: leave out --store, --k and --document-order."
        )
    retrieved: dict[str, Sequence[Document]] = {}
    if store is not None:
        with open_store(store, embedder, read_only=True) as documents:
            retrieved = _retrieve(documents, lines, k, broken)
    lines = [line for line in lines if line.question is None or line.custom_id in retrieved]
    settings = {"max_tokens": max_tokens, "temperature": temperature}
    digests = _digests(_Requests(lines, layout, settings, retrieved, document_order))
    requests = _Requests(lines, layout, settings, _arranged(retrieved, document_order), document_order)
    summary = BatchSummary(len(lines), num_broken=len(broken))

    with AnswerFile.open(output, digests) as answers:
        summary.num_earlier = len(answers.models)
        for each in broken:
            answers.append(each.record())
        remaining = [line for line in lines if line.custom_id not in answers.models]
        if remaining:
            with join() as engine:
                _check_model(engine, answers, lines)
                _run(engine, answers, requests, remaining, digests, max_concurrency, summary)
    if as_json:
        print_json({**asdict(summary), "output": str(output)})
    else:
        click.echo(str(summary))
    if broken:
        click.echo(f"ragcache: error: {len(broken)} lines of {questions} are broken: {reasons(broken)}", err=True)
    if summary.num_failed:
        click.echo(
            f"ragcache: error: {summary.num_failed} requests failed, {output} says why: run it again to repeat them",
            err=True,
        )
    if broken or summary.num_failed:
        click.get_current_context().exit(EXIT_ERROR)


def _retrieve(
    store: DocumentStore, lines: Iterable[BatchLine], k: int | None, broken: list[BrokenLine]
) -> dict[str, Sequence[Document]]:
    """Return the documents of each question; questions without a search are added to ``broken``."""
    num_wanted = k or max(1, min(_DEFAULT_K, len(store)))
    store.check_k(num_wanted)
    known: dict[DocId, Document] = {}
    retrieved: dict[str, Sequence[Document]] = {}
    to_search = [line for line in lines if line.question is not None]
    with counting_requests("searching", len(to_search)) as progress:
        for line in to_search:
            try:
                found = store.search(str(line.question), num_wanted).documents
                retrieved[line.custom_id] = [known.setdefault(document.doc_id, document) for document in found]
            except SearchError as error:
                broken.append(BrokenLine(line.number, line.custom_id, str(error)))
            progress(1)
    return retrieved


def _arranged(retrieved: Mapping[str, Sequence[Document]], order: DocumentOrder) -> Mapping[str, Sequence[Document]]:
    """Return the documents of each question in prompt order."""
    known = {document.doc_id: document for found in retrieved.values() for document in found}
    ids = [tuple(document.doc_id for document in found) for found in retrieved.values()]
    if order == "cache_aware":
        ids = arrange_documents(ids, {doc_id: len(document.text) for doc_id, document in known.items()})
    else:
        ids = [tuple(each[i] for i in arrange(each, order, None)) for each in ids]
    return {name: [known[doc_id] for doc_id in each] for name, each in zip(retrieved, ids, strict=True)}


def _digests(requests: _Requests) -> dict[str, str]:
    """Return the digest of each request by id, with its documents in retrieval order.

    So a file with more questions than an earlier one keeps the answers, although these change the order of documents.
    """
    digests = {}
    for line in requests.lines:
        inputs: Sequence[object] = [line.body]
        if line.question is not None:
            inputs = [requests.messages(line), requests.settings, requests.order]
        digests[line.custom_id] = digest_of(line.custom_id, *inputs)
    return digests


def _check_model(engine: Engine, answers: AnswerFile, lines: Iterable[BatchLine]) -> None:
    """Reject adding answers of one model to those of another.

    Raises:
        ConfigError: an earlier run asked another model.
    """
    for line in lines:
        earlier = answers.models.get(line.custom_id, engine.model)
        if "model" not in line.body and earlier != engine.model:
            raise ConfigError(
                f"{answers.path} holds answers of the model {quoted(earlier)}, the engine serves "
                f"{quoted(engine.model)}: serve the same, or name another --output"
            )


def _run(
    engine: Engine,
    answers: AnswerFile,
    requests: _Requests,
    remaining: Sequence[BatchLine],
    digests: Mapping[str, str],
    max_concurrency: int,
    summary: BatchSummary,
) -> None:
    """Answer the remaining requests, and count them; an early end reports the number of answers."""
    from ragcache_core.client.batch import run_in_order

    began_s = time.monotonic()

    async def run(index: int, advance: Callable[[int], object]) -> None:
        line = remaining[index]
        record = await _answer(engine, requests, line, digests[line.custom_id])
        answers.append(record)
        summary.num_failed += record["error"] is not None
        if record["error"] is None:
            usage = record["response"]["body"].get("usage") or {}
            summary.num_answered += 1
            summary.num_prompt_tokens += usage.get("prompt_tokens") or 0
            summary.num_cached_tokens += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        advance(1)

    order = order_requests([requests.key(line, engine.model) for line in remaining])
    try:
        with counting_requests("answering", len(remaining)) as advance:
            asyncio.run(run_in_order(order, lambda index: run(index, advance), max_concurrency))
    except BaseException:
        num_done = summary.num_earlier + summary.num_answered
        click.echo(
            f"ragcache: {num_done:,} of {summary.num_requests:,} requests are answered in {answers.path}: run it "
            "again to continue",
            err=True,
        )
        raise
    finally:
        summary.duration_s = round(time.monotonic() - began_s, 3)


async def _answer(engine: Engine, requests: _Requests, line: BatchLine, digest: str) -> dict[str, Any]:
    """Return the record of an answer, or of a failure.

    Raises:
        EngineError: the engine cannot answer any request.
    """
    shown: dict[str, Any] = {}
    if line.question is not None:
        shown["documents"] = [document.doc_id for document in requests.documents[line.custom_id]]
    try:
        response = await _send(engine, _body(engine, requests, line))
    except EngineHungError:
        raise
    except (*_FAILED, EngineTimeoutError) as error:
        failed = {"code": type(error).__name__, "message": str(error)}
        return to_record(line.custom_id, digest, error=failed, **shown)
    body = _json_of(response)
    whole = {"status_code": response.status_code, "request_id": body.get("id"), "body": body}
    if response.status_code == 200 and _is_whole(body):
        return to_record(line.custom_id, digest, whole, **shown)
    error_body = body.get("error")
    message = error_body.get("message") if isinstance(error_body, Mapping) else None
    code = "incomplete" if response.status_code == 200 else str(response.status_code)
    failed = {"code": code, "message": str(message or response.text)[:1000]}
    return to_record(line.custom_id, digest, whole, failed, **shown)


def _is_whole(body: Mapping[str, Any]) -> bool:
    """Return whether the body of a response is an answer, and not one that the server cut off, as at a pause."""
    choices = body.get("choices")
    return isinstance(choices, list) and all(choice.get("finish_reason") not in _CUT_OFF for choice in choices)


def _body(engine: Engine, requests: _Requests, line: BatchLine) -> dict[str, Any]:
    """Return the body of a request, with the documents of a question's prompt."""
    if line.question is None:
        return {"model": engine.model, **line.body}
    messages, settings = requests.messages(line), {"model": engine.model, **requests.settings}
    plan = engine.integration.prompts.plan_chat(
        messages, documents=requests.documents[line.custom_id], settings=settings
    )
    return {**settings, "messages": messages, **plan.extra_body}


async def _send(engine: Engine, body: Mapping[str, Any]) -> httpx.Response:
    """Return the server's response, without a time limit.

    Raises:
        EngineError: the server is not there for any request.
    """
    import httpx

    from ragcache_core.client.server_api import Call, as_it_is

    unbounded = httpx.Timeout(None, connect=10.0)
    response = await engine.integration.api.aask(Call(CHAT_URL, as_it_is, method="POST", body=body, timeout=unbounded))
    if response.status_code in (401, 403):
        raise EngineAuthError(f"the engine at {engine.base_url} refused the API key: pass the server's api_key")
    if response.status_code == 503:
        raise EngineError(f"the engine at {engine.base_url} takes no requests: {response.text:.400}")
    return response


def _json_of(response: httpx.Response) -> dict[str, Any]:
    try:
        body = response.json()
    except ValueError:
        body = None
    return body if isinstance(body, dict) else {"text": response.text[:1000]}
