"""``ragcache ask``: retrieve documents, then answer from them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ragcache_core.cli.command import Command, print_json, report
from ragcache_core.cli.options import (
    EmbedderName,
    embedder_option,
    engine_opener,
    engine_options,
    k_option,
    layout_of,
    layout_options,
    open_store,
    store_option,
    temperature_option,
    vllm_args_argument,
)
from ragcache_core.cli.output import printable
from ragcache_core.errors import (
    PromptError,
    PromptTooLongError,
    RequestRejectedError,
    SearchError,
    TokenizerUnavailableError,
)
from ragcache_core.prompt import ChatMessage, PromptLayout, check_prompt_fits, render_chat
from ragcache_core.types import Document

if TYPE_CHECKING:
    from ragcache_core.client import Engine, Generation
    from ragcache_core.client.generation import Prompt
    from ragcache_core.retrieval import DocumentStore
    from ragcache_core.retrieval.base import Metric
    from ragcache_core.types import RetrievalUpdate


DEFAULT_MAX_TOKENS = 256


@dataclass(frozen=True, slots=True)
class _ChatTurn:
    question: ChatMessage
    answer: str
    documents: tuple[Document, ...]


@dataclass(slots=True)
class Conversation:
    """Earlier questions and answers. A document shown with a question is not shown again later."""

    layout: PromptLayout
    _turns: list[_ChatTurn] = field(default_factory=list)

    def prompt(self, engine: Engine, documents: Sequence[Document], question: str, max_tokens: int | None) -> Prompt:
        """Return the prompt for ``question`` with space for ``max_tokens``, or the default behind other questions.

        Where the context window is too short, the earlier half of the conversation is dropped, so that the next prompts
        share a prefix again.

        Raises:
            PromptError: the question is empty. PromptTooLongError: it does not fit alone.
        """
        while True:
            try:
                tokenizer = engine.tokenizer
                if not self._turns:
                    prompt = self.layout.render(tokenizer, documents, question)
                    check_prompt_fits(len(prompt.token_ids), engine.max_model_len, max_tokens or 1)
                    return prompt
                shown = [(d.doc_id, self.layout.document_text(d)) for d in [*self._shown(), *self._new(documents)]]
                prompt = render_chat(tokenizer, self._messages(documents, question), shown)
                check_prompt_fits(len(prompt.token_ids), engine.max_model_len, max_tokens or DEFAULT_MAX_TOKENS)
                return prompt
            except TokenizerUnavailableError:  # the server tokenises; which tokens are which document stays unknown
                return self._messages(documents, question)
            except PromptTooLongError:
                if not self._turns:
                    raise
                del self._turns[: (len(self._turns) + 1) // 2]

    def add(self, documents: Sequence[Document], question: str, answer: str) -> None:
        """Record an answered question."""
        new = self._new(documents)
        self._turns.append(_ChatTurn(self.layout.messages(new, question)[-1], answer, tuple(new)))

    def clear(self) -> None:
        """Remove all questions."""
        self._turns.clear()

    def __len__(self) -> int:
        return len(self._turns)

    def _shown(self) -> list[Document]:
        return [document for turn in self._turns for document in turn.documents]

    def _new(self, documents: Sequence[Document]) -> list[Document]:
        shown = {document.doc_id for document in self._shown()}
        return [document for document in documents if document.doc_id not in shown]

    def _messages(self, documents: Sequence[Document], question: str) -> list[ChatMessage]:
        *prefix, last_message = self.layout.messages(self._new(documents), question)
        for turn in self._turns:
            prefix += [turn.question, {"role": "assistant", "content": turn.answer}]
        return [*prefix, last_message]


_DEFAULT_K = 2


@click.command(
    cls=Command,
    short_help="Answer questions from the documents in a store.",
    examples=[
        'ragcache ask "Where does the river Mel end?" --store notes.store --model examples/demo_model',
        'ragcache ask "Where does the river Mel end?" --store notes.store --url http://127.0.0.1:8000 --json',
        "ragcache ask --store notes.store --model examples/demo_model",
        "ragcache ask --store notes.store --model examples/demo_model < questions.txt",
        'ragcache ask "Where?" --store notes.store --model org/model -- --max-model-len 8192',
    ],
)
@click.argument("question", required=False)
@store_option
@engine_options
@embedder_option
@k_option
@click.option(
    "--max-tokens",
    type=click.IntRange(1),
    help="Maximum length of an answer in tokens. [default: 256, or what fits into the context window]",
)
@temperature_option
@layout_options
@click.option("--show-documents", is_flag=True, help="Print the retrieved documents before the answer.")
@click.option("--stream", is_flag=True, help="Print the answer as it is generated.")
@vllm_args_argument
def ask(
    question: str | None,
    store: Path,
    embedder: EmbedderName | None,
    k: int | None,
    max_tokens: int | None,
    temperature: float,
    show_documents: bool,
    stream: bool,
    vllm_args: tuple[str, ...],
    as_json: bool,
    **options: Any,
) -> None:
    """Answer QUESTION from the documents in the store.

    Without QUESTION, on a terminal: a conversation, in which the model sees earlier questions and answers. Ctrl-C stops
    an answer, Ctrl-D leaves, /new begins another conversation. From a file or a pipe, or with "-": one question per
    line, each on its own; later ones hit the cached documents of earlier ones.

    The answer goes to standard output; documents, time to first token and cached tokens go to standard error. With
    --json, each question is one line with one object.
    """
    if question is not None and question.startswith("--"):  # an argument after "--" without a question
        vllm_args, question = (question, *vllm_args), None
    join = engine_opener(options, vllm_args)
    if stream and as_json:
        raise click.UsageError("--stream prints text and --json an object: give one of them.")
    layout = layout_of(options)
    is_conversation = question is None and sys.stdin.isatty()
    is_streamed = stream or (is_conversation and not as_json)

    with ExitStack() as stack:
        documents = open_store(store, embedder, read_only=True)
        stack.callback(documents.close)
        num_wanted = k or max(1, min(_DEFAULT_K, len(documents)))
        engine: Engine | None = None

        def reply(text: str, conversation: Conversation) -> None:
            nonlocal engine
            found = _search(documents, text, num_wanted)
            if engine is None:  # only now: a store that cannot answer is known before a model is loaded
                engine = stack.enter_context(join())
            if show_documents and not as_json:
                _show_documents(found, documents.metric)
            answer = _answer(engine, conversation, found, text, max_tokens, temperature, _printer(is_streamed))
            if as_json:
                print_json(_as_json(text, found, documents.metric, answer))
            else:
                click.echo("" if is_streamed else answer.text)
                click.echo(_summary(found, answer), err=True)

        documents.check_k(num_wanted)
        if is_conversation:
            engine = stack.enter_context(join())
            _converse(reply, Conversation(layout), as_json=as_json)
        else:
            for text in _questions(question):
                reply(text, Conversation(layout))


def _questions(question: str | None) -> Iterator[str]:
    if question is not None and question != "-":
        yield question
        return
    for number, line in enumerate(sys.stdin.buffer, start=1):
        try:
            text = line.decode("utf-8-sig").strip()
        except UnicodeDecodeError as error:
            at = f"byte 0x{line[error.start]:02x} at offset {error.start}"
            raise PromptError(
                f"question in line {number} is not UTF-8 ({at}): save the file as text in UTF-8"
            ) from error
        if text:
            yield text


def _converse(reply: Callable[[str, Conversation], None], conversation: Conversation, *, as_json: bool) -> None:
    """Read and answer questions until the input ends; errors of a question do not end it."""
    with suppress(ImportError):
        import readline  # noqa: F401 (arrow keys, and the questions before)
    click.echo("Ctrl-C stops an answer, Ctrl-D leaves, /new begins another conversation.", err=True)
    while True:
        try:
            text = _read_line("> ").strip()
        except EOFError:
            click.echo("", err=True)
            return
        except KeyboardInterrupt:
            click.echo("", err=True)
            continue
        if text == "/new":
            conversation.clear()
        elif text.startswith("/"):
            click.echo(f"ragcache: there is no {text.split()[0]}: /new begins another conversation", err=True)
        elif text:
            try:
                reply(text, conversation)
            except KeyboardInterrupt:
                click.echo("\nragcache: stopped", err=True)
            except (PromptError, RequestRejectedError, SearchError) as error:
                report(error, as_json=as_json)


def _read_line(prompt: str) -> str:
    """Return a line of the terminal, with the prompt on the terminal too.

    Raises:
        EOFError: there are no more.
    """
    if sys.stdout.isatty():
        return input(prompt)
    click.echo(prompt, nl=False, err=True)
    if not (line := sys.stdin.readline()):
        raise EOFError
    return line


def _search(store: DocumentStore, question: str, k: int) -> RetrievalUpdate:
    """Return the last stage: the result of the whole index."""

    async def last() -> RetrievalUpdate:
        return [update async for update in store.search_staged(question, k)][-1]

    return asyncio.run(last())


def _answer(
    engine: Engine,
    conversation: Conversation,
    found: RetrievalUpdate,
    question: str,
    max_tokens: int | None,
    temperature: float,
    show: Callable[[str], None],
) -> Generation:
    from ragcache_core.client.generation import join_chunks

    num_before = len(conversation)
    prompt = conversation.prompt(engine, found.documents, question, max_tokens)
    if num_forgotten := num_before - len(conversation):
        click.echo(f"ragcache: the context window is full, the first {num_forgotten} questions are forgotten", err=True)
    chunks = []
    answers = engine.stream(prompt, max_tokens=max_tokens or DEFAULT_MAX_TOKENS, temperature=temperature)
    with closing(answers):  # an interrupt ends the request in the engine
        for chunk in answers:
            chunks.append(chunk)
            show(chunk.text)
    answer = join_chunks(chunks)
    conversation.add(found.documents, question, answer.text)
    return answer


def _printer(stream: bool) -> Callable[[str], None]:
    return (lambda text: click.echo(text, nl=False)) if stream else (lambda _: None)


_SCORE_NAMES: dict[Metric, str] = {"l2": "distance", "ip": "similarity"}
"""Name of a store's scores: distance (smaller is nearer) or similarity (larger is nearer)."""


def _show_documents(found: RetrievalUpdate, metric: Metric) -> None:
    for document, score in zip(found.documents, found.scores, strict=True):
        click.echo(f"[{printable(document.doc_id)}] {_SCORE_NAMES[metric]} {score:.4g}", err=True)
        for line in document.text.strip().splitlines():
            click.echo(f"  {printable(line.expandtabs())}", err=True)


def _summary(found: RetrievalUpdate, answer: Generation) -> str:
    stats = answer.stats
    tiers = (
        *((stats.num_gpu_tokens, "GPU"), (stats.num_host_tokens, "host"), (stats.num_disk_tokens, "disk")),
        (stats.num_shared_tokens, "the shared store"),
    )
    tier_counts = ", ".join(f"{num_tokens} from {tier}" for num_tokens, tier in tiers if num_tokens)
    first = "" if stats.ttft_s is None else f"; first token after {stats.ttft_s:.3f} s"
    names = ", ".join(printable(document.doc_id) for document in found.documents)
    return (
        f"[{names}] {stats.num_prompt_tokens} prompt tokens, {stats.num_cached_tokens} of them cached"
        f"{f' ({tier_counts})' if tier_counts else ''}{first}, "
        f"all after {stats.total_s:.3f} s"
    )


def _as_json(question: str, found: RetrievalUpdate, metric: Metric, answer: Generation) -> dict[str, object]:
    scored: Sequence[dict[str, object]] = [
        {"id": document.doc_id, _SCORE_NAMES[metric]: score}
        for document, score in zip(found.documents, found.scores, strict=True)
    ]
    return {
        "question": question,
        "answer": answer.text,
        "finish_reason": answer.finish_reason,
        "documents": scored,
        "stats": answer.stats.to_dict(),
    }
