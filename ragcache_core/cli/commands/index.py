"""``ragcache index``: read files into a document store."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ragcache_core.cli.command import EXIT_ERROR, Command, options_in_cli_wording, print_json, to_cli_wording
from ragcache_core.cli.commands.forget import check_complete, forget_option, forgetting, lines_of
from ragcache_core.cli.options import (
    EmbedderName,
    api_key_option,
    embedder_option,
    join_server,
    make_embedder,
    open_store,
    read_size,
    store_option,
    together,
)
from ragcache_core.cli.output import printable
from ragcache_core.cli.warming import warm_store
from ragcache_core.errors import ConfigError, DocumentError, DuplicateDocumentError, StoreError, StoreNotFoundError
from ragcache_core.runtime.terminal import Bar

if TYPE_CHECKING:
    from ragcache_core.ingest import Changes, Chunking, FileLimits, FileOrigin, FileReading, FoundFiles, Splitting
    from ragcache_core.retrieval import DocumentStore
    from ragcache_core.retrieval.base import Encoding, IndexKind, Metric
    from ragcache_core.stats import RegistrationReceipt
    from ragcache_core.types import DocId


_DEFAULT_TOKENS = 512

splitting_options = together(
    click.option(
        "--chunk-chars",
        type=int,
        help="Maximum length of a text chunk in characters. [default: the store's own, 1600 for a new store]",
    ),
    click.option(
        "--chunk-min-chars",
        type=int,
        help="Characters after which a chunk may end at a good boundary. [default: --chunk-chars]",
    ),
    click.option(
        "--chunk-overlap-chars",
        type=int,
        help="Characters of a chunk that the next one repeats. [default: the store's own, 0 for a new store]",
    ),
    click.option(
        "--tokenizer",
        metavar="MODEL",
        help="Split by tokens of this model: a folder, or a name on the Hugging Face hub. [default: "
        "the store's own, by characters for a new store]",
    ),
    click.option(
        "--chunk-tokens",
        type=int,
        help="Maximum length of a text chunk in tokens. [default: the store's own, 512 for a new store]",
    ),
    click.option(
        "--chunk-min-tokens",
        type=int,
        help="Tokens after which a chunk may end at a good boundary. [default: --chunk-tokens]",
    ),
    click.option(
        "--chunk-overlap-tokens",
        type=int,
        help="Tokens of a chunk that the next one repeats. [default: the store's own, 0 for a new store]",
    ),
)
_LENGTHS = {"chunk_{}": "max_length", "chunk_min_{}": "min_length", "chunk_overlap_{}": "overlap"}


def choose_splitting(store: Path, given_options: dict[str, Any]) -> tuple[Splitting, Chunking]:
    """Return the splitting of texts for the store at ``store``, and its record.

    What the options do not say is as it was; by tokens a store is split by those of one tokenizer, or not at all.

    Raises:
        ConfigError: the options contradict each other, or what the store was split by.
        TokenizerUnavailableError: there is no such tokenizer.
    """
    from ragcache_core.ingest import Chunking, Splitting, read_chunking, read_origins

    former = read_chunking(store) or (Chunking() if store.is_dir() and read_origins(store) else None)
    chars, tokens = (
        {
            name: given_options[key]
            for pattern, name in _LENGTHS.items()
            if given_options[key := pattern.format(unit)] is not None
        }
        for unit in ("chars", "tokens")
    )
    name = given_options["tokenizer"]
    if chars and (tokens or name is not None):
        raise ConfigError(
            "the --chunk options in characters and in tokens exclude each other: leave those of one of them out"
        )
    by_tokens = bool(tokens or name is not None)
    if former is not None and (chars or by_tokens) and by_tokens != (former.unit == "tokens"):
        raise ConfigError(
            f"{store} is split by {former.unit}, not by {'tokens' if by_tokens else 'characters'}: leave the --chunk "
            "options and --tokenizer out, or choose another --store"
        )
    if name is None and former is not None:
        name = former.tokenizer
    if name is None:
        if tokens:
            raise ConfigError("the --chunk options in tokens count tokens of a model: name it with --tokenizer MODEL")
        chunking = replace(former or Chunking(), **chars)
        return Splitting(chunking.max_length, chunking.min_length, chunking.overlap), chunking
    counted, sha256 = _token_counter(name)
    if former is not None and former.tokenizer_sha256 != sha256:
        raise ConfigError(
            f"{store} is split by the tokens of {former.tokenizer} as it was then, and {name} counts differently: "
            "name that one with --tokenizer, or choose another --store"
        )
    place = str(folder.absolute()) if (folder := Path(name)).is_dir() else name
    before = former or Chunking(max_length=_DEFAULT_TOKENS)
    chunking = replace(before, tokenizer=place, tokenizer_sha256=sha256, **tokens)
    return Splitting(chunking.max_length, chunking.min_length, chunking.overlap, counted), chunking


def _token_counter(name: str) -> tuple[Callable[[str], int], str]:
    """Return a token counter, and the hash of its tokenizer."""
    from ragcache_core.ingest.token_counter import TokenCounter

    counter = TokenCounter(name)
    return counter.num_tokens, counter.sha256


_DOCUMENTS_PER_READ = 1024
_DOCUMENTS_PER_REPORT = 32
"""MiniLM embeds this many in two seconds on a CPU."""


@dataclass(frozen=True, slots=True)
class IndexSummary:
    """The result of ``ragcache index``."""

    store: str
    num_files: int
    num_other_files: int
    num_bad: int
    num_added: int
    num_replaced: int
    num_removed: int
    num_unchanged: int
    num_kept: int
    num_documents: int

    def __str__(self) -> str:
        parts = [
            f"{_count(self.num_added, 'document')} added",
            f"{self.num_replaced} replaced" * bool(self.num_replaced),
            f"{_count(self.num_removed, 'former document')} removed" * bool(self.num_removed),
            f"{self.num_unchanged} unchanged" * bool(self.num_unchanged),
            f"{self.num_bad} bad left out" * bool(self.num_bad),
            f"{_count(self.num_kept, 'former document')} of bad files kept" * bool(self.num_kept),
            f"{_count(self.num_other_files, 'file')} of other kinds passed over" * bool(self.num_other_files),
        ]
        return f"{self.store}: {', '.join(filter(None, parts))}; it holds {_count(self.num_documents, 'document')}"


def _count(number: int, noun: str) -> str:
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


@click.command(
    cls=Command,
    short_help="Read files and directories into a document store.",
    examples=[
        "ragcache index notes/ --store notes.store",
        "ragcache index notes/ --store notes.store --update --prune",
        "ragcache index notes/ --store notes.store --update --prune --forget http://127.0.0.1:8000",
        "ragcache index notes/ --store notes.store --warm http://127.0.0.1:8000",
        "ragcache index notes/ --store notes.store --register http://127.0.0.1:8000",
        "ragcache index notes/ --store notes.store --tokenizer my-model --chunk-tokens 512 --chunk-overlap-tokens 64",
        "ragcache index faq.jsonl guide.md --store help.store --index hnsw --chunk-chars 800 --json",
    ],
)
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="DIR...")
@store_option
@click.option("--index", type=click.Choice(["ivf", "hnsw", "flat"]), help="Vector index of a new store. [default: ivf]")
@click.option(
    "--metric",
    type=click.Choice(["l2", "ip"]),
    help="Distance of vectors in a new store: l2 (Euclidean) or ip (inner product). [default: l2]",
)
@click.option(
    "--encoding",
    type=click.Choice(["flat", "sq8", "pq"]),
    help="Encoding of vectors in a new store: flat (float32), sq8 (8 bits) or pq (product "
    "quantisation). [default: flat]",
)
@embedder_option
@splitting_options
@click.option(
    "--max-file-bytes",
    default="64MiB",
    show_default=True,
    callback=read_size,
    metavar="SIZE",
    help="Reject files above this size.",
)
@click.option(
    "--max-file-seconds",
    "max_file_s",
    type=float,
    default=120.0,
    show_default=True,
    help="Skip a file that takes more than this many seconds of CPU time.",
)
@click.option("--skip-errors", is_flag=True, help="Exit with status 0 even if documents were skipped.")
@click.option("--update", is_flag=True, help="Replace stored documents whose files have changed.")
@click.option("--prune", is_flag=True, help="Remove stored documents whose files no longer exist in DIR.")
@forget_option
@click.option(
    "--warm",
    "warm_url",
    metavar="URL",
    help="Afterwards prefill the documents on this server, as 'ragcache warm' does.",
)
@click.option(
    "--register",
    "register_urls",
    metavar="URL",
    multiple=True,
    help="Afterwards register the documents with this server, so that it recognises them in "
    "prompts of any client. May be repeated.",
)
@api_key_option
@click.option("--rebuild-index", is_flag=True, help="Rebuild the store's index from its vectors, if it is damaged.")
def index(
    paths: tuple[Path, ...],
    store: Path,
    index: IndexKind | None,
    metric: Metric | None,
    encoding: Encoding | None,
    embedder: EmbedderName | None,
    max_file_bytes: int,
    max_file_s: float,
    skip_errors: bool,
    update: bool,
    prune: bool,
    forget_urls: tuple[str, ...],
    warm_url: str | None,
    register_urls: tuple[str, ...],
    api_key: str | None,
    rebuild_index: bool,
    as_json: bool,
    **chunks: Any,
) -> None:
    """Read files and directories DIR into a document store; make the store if there is none.

    Text (.txt), Markdown (.md), HTML (.html, .htm), JSON Lines (.jsonl: {"text", "id", "metadata"} on each line),
    tables (.csv, .tsv: a document per row) and source code are read, in UTF-8; with the extra "loaders" PDF, Word
    (.docx) and reStructuredText (.rst) as well. Links that lead out of DIR are not followed. Long texts are split at
    paragraphs and sentences, by characters or by tokens of a model; a store remembers how. Reading a directory again
    adds new texts and skips unchanged ones. Everything is read before anything is stored: Ctrl-C leaves the store
    unchanged. A document or directory that cannot be read is reported and left out, and its stored documents stay; the
    exit code is 1 then, and 0 with --skip-errors.
    """
    from ragcache_core.ingest import FileLimits, FileOrigin, compare, read_origins, write_chunking, write_origins

    splitting, chunking = choose_splitting(store, chunks)
    with options_in_cli_wording(click.get_current_context().command):
        limits = FileLimits(max_file_bytes, max_file_s)
    files, readings, num_bad = _read(paths, splitting, limits)
    wanted = {"index": index, "metric": metric, "encoding": encoding}
    options: dict[str, str] = {name: value for name, value in wanted.items() if value is not None}
    with (
        forgetting(forget_urls, api_key) as forget_documents,
        _opened(store, embedder, options, rebuild_index) as target,
    ):
        origins = read_origins(target.path)
        whole = {FileOrigin.of(reading.file) for reading in readings if reading.is_whole}
        read = {document.doc_id: FileOrigin.of(reading.file) for reading in readings for document in reading.documents}
        former = [doc_id for doc_id, origin in origins.items() if origin in whole]
        gone = set(_gone(origins, paths) if prune else ())
        former += gone
        changes = compare((d for reading in readings for d in reading.documents), target, former)
        _check_origins(changes, origins, read)
        outdated = [doc_id for doc_id in changes.replaced if doc_id not in gone]
        if outdated and not update:
            raise DuplicateDocumentError(
                f"{len(outdated)} documents in {store} differ from their files, {outdated[0]!r} for "
                "one: replace them with --update, or choose another --store"
            )
        _store(target, changes)
        stored = set(target.ids())
        bad = {FileOrigin.of(file) for file in files.files} - whole
        kept = [
            doc_id
            for doc_id, origin in origins.items()
            if doc_id in stored - read.keys()
            and (origin in bad or any(origin.is_below(folder) for folder in files.unreadable))
        ]
        write_chunking(target.path, chunking)
        write_origins(target.path, {i: origin for i, origin in {**origins, **read}.items() if i in stored})
        summary = IndexSummary(
            store=str(store),
            num_files=len(files.files),
            num_other_files=files.num_skipped,
            num_bad=num_bad,
            num_added=len(changes.new),
            num_replaced=len(changes.changed),
            num_removed=len(changes.left_over),
            num_unchanged=changes.num_unchanged,
            num_kept=len(kept),
            num_documents=len(target),
        )
        receipts = forget_documents(changes.replaced)
        registered = {url: _register(target, url, api_key) for url in register_urls}
        warmed = None if warm_url is None else warm_store(target, warm_url, api_key)
    if as_json:
        forgotten = {"forgotten": {url: receipt.to_dict() for url, receipt in receipts.items()}} if forget_urls else {}
        others = {"registered": {url: each.to_dict() for url, each in registered.items()}} if registered else {}
        print_json({**asdict(summary), **forgotten, **others, **({} if warmed is None else {"warmed": warmed[0]})})
    else:
        click.echo("\n".join([str(summary), *(f"{url}: {lines_of(each)[0]}" for url, each in receipts.items())]))
        for url, receipt in registered.items():
            click.echo(f"{url}: {_count(receipt.num_registered, 'document')} registered")
        click.echo("\n".join(warmed[1]) if warmed is not None else "", nl=warmed is not None)
    check_complete(receipts)
    if num_bad and not skip_errors:
        counts = {"document": num_bad - len(files.unreadable), "directory": len(files.unreadable)}
        what = " and ".join(_count(number, noun) for noun, number in counts.items() if number)
        kept_ones = f"; {_count(summary.num_kept, 'former document')} of bad files kept" * bool(summary.num_kept)
        click.echo(
            f"ragcache: error: {what} could not be read{kept_ones}: correct what is reported above, or accept it with "
            "--skip-errors",
            err=True,
        )
        click.get_current_context().exit(EXIT_ERROR)


def _register(store: DocumentStore, url: str, api_key: str | None) -> RegistrationReceipt:
    """Register a store's documents with a server, and report those that it rejects.

    What is registered already costs the server no more than its hash, so a run that was interrupted is repeated.
    """
    ids = store.ids()
    starts = range(0, len(ids), _DOCUMENTS_PER_READ)
    documents = (each for at in starts for each in store.get(ids[at : at + _DOCUMENTS_PER_READ]))
    with join_server(url, api_key) as engine, Bar("registering", len(ids)) as bar:
        receipt = engine.register(documents, progress=bar.advance)
    for what, problems in (("not registered", receipt.errors), ("registered, but", receipt.warnings)):
        for doc_id, why in problems.items():
            click.echo(f"ragcache: {what}: {printable(doc_id)}: {why}", err=True)
    return receipt


def _gone(origins: Mapping[DocId, FileOrigin], paths: Iterable[Path]) -> list[DocId]:
    """Return the stored documents of deleted files in the directories."""
    folders = {os.path.realpath(path) for path in paths if path.is_dir()}
    return [doc_id for doc_id, origin in origins.items() if origin.folder in folders and origin.is_gone()]


def _read(paths: Iterable[Path], splitting: Splitting, limits: FileLimits) -> tuple[FoundFiles, list[FileReading], int]:
    """Return the files at ``paths``, their documents, and the numbers of invalid documents, files and directories."""
    from ragcache_core.ingest import find_files, read_files

    num_bad = 0

    def report(error: DocumentError) -> None:
        nonlocal num_bad
        num_bad += 1
        click.echo(f"ragcache: left out: {to_cli_wording(str(error))}", err=True)

    files = find_files(paths, on_bad=report)
    with Bar("reading", len(files.files), "files") as bar:
        readings = []
        for reading in read_files(files.files, splitting, on_bad=report, limits=limits):
            readings.append(reading)
            bar.advance()
    if not any(reading.documents for reading in readings):
        raise DocumentError(f"none of {len(files.files)} files holds a document that can be stored: nothing was stored")
    return files, readings, num_bad


@contextmanager
def _opened(
    path: Path, embedder: EmbedderName | None, options: dict[str, str], rebuild_index: bool
) -> Iterator[DocumentStore]:
    """Open or create the store; remove a created one after a failure."""
    from ragcache_core.retrieval import DocumentStore

    try:
        store = open_store(path, embedder, rebuild_index=rebuild_index)
    except StoreNotFoundError:
        existed = path.exists()
        if existed and path.is_dir() and any(path.iterdir()):  # the current one, too, which an unset variable names
            raise StoreError(f"{path} is no document store and holds other files: name a new directory") from None
        store = DocumentStore.create(path, embedder=make_embedder(embedder), **options)  # type: ignore[arg-type]
        with store:
            try:
                yield store
            except BaseException:
                if not existed:  # while the store is still locked: it has no other process's documents
                    shutil.rmtree(path, ignore_errors=True)
                raise
        return
    with store:
        _check_options(store, options)
        yield store


def _check_options(store: DocumentStore, options: dict[str, str]) -> None:
    from ragcache_core.retrieval.storage.manifest import read_manifest

    made = read_manifest(store.path).options
    made_with = {"index": made.kind, "metric": made.metric, "encoding": made.encoding}
    for name, value in options.items():
        if made_with[name] != value:
            raise ConfigError(
                f"{store.path} was made with --{name} {made_with[name]}, not {value}: leave the option out, or choose "
                "another --store"
            )


def _check_origins(changes: Changes, origins: Mapping[DocId, FileOrigin], read: Mapping[DocId, FileOrigin]) -> None:
    """Reject replacing one file's document by another file's of the same name."""
    for document in changes.changed:
        before, now = origins.get(document.doc_id, read[document.doc_id]), read[document.doc_id]
        if before != now and not before.is_gone():
            raise DuplicateDocumentError(
                f"document {document.doc_id!r} is in the store from {Path(before.folder, before.name)} and again in "
                f"{Path(now.folder, now.name)}: give one file another name, or choose another --store for {now.folder}"
            )


def _store(store: DocumentStore, changes: Changes) -> None:
    """Save the changes: new documents in one step, then without obsolete chunks."""
    documents = [*changes.changed, *changes.new]
    with Bar("embedding", unit="steps") as bar:  # the built-in embedder learns from new documents first: half of it
        store.put(documents, progress=bar.move_to, batch_size=_DOCUMENTS_PER_REPORT)
    store.delete(changes.left_over)
