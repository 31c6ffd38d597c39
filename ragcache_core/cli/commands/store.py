"""``ragcache store``: what a document store holds, and what is to be taken out of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ragcache_core.cli.command import Command, Group, print_json
from ragcache_core.cli.commands.forget import check_complete, forget_option, forgetting, lines_of
from ragcache_core.cli.options import api_key_option, store_option
from ragcache_core.cli.output import printable
from ragcache_core.errors import ConfigError, UnknownDocumentError

if TYPE_CHECKING:
    from ragcache_core.ingest import FileOrigin
    from ragcache_core.retrieval import DocumentStore
    from ragcache_core.stats import ForgetReceipt
    from ragcache_core.types import DocId, Document

_PAGE = 50


@click.group(cls=Group, short_help="List or remove the documents of a store.")
def store() -> None:
    """List and remove documents of a document store."""


@store.command(
    cls=Command,
    short_help="List the documents of a store.",
    examples=[
        "ragcache store ls --store notes.store",
        "ragcache store ls --store notes.store --offset 50 --limit 100 --json",
    ],
)
@store_option
@click.option("--offset", type=click.IntRange(0), default=0, show_default=True, help="Documents to skip.")
@click.option("--limit", type=click.IntRange(1), default=_PAGE, show_default=True, help="Documents to list.")
def ls(store: Path, offset: int, limit: int, as_json: bool) -> None:
    """List documents with their lengths in characters and the files they came from, in the order they were added.

    First come their number, their size on disk, the index and the embedder.
    """
    from ragcache_core.ingest import read_origins

    with _opened(store, read_only=True) as opened:
        origins = read_origins(opened.path)
        documents = opened.get(opened.ids()[offset : offset + limit])
        stats = opened.stats()
    end = offset + len(documents)
    if as_json:
        listed = [_as_json(document, origins.get(document.doc_id)) for document in documents]
        print_json({"store": str(store), "stats": asdict(stats), "offset": offset, "documents": listed})
        return
    click.echo(
        f"{store}: {_count(stats.num_documents)}, {stats.num_bytes:,} bytes; index {stats.index_layout or 'none yet'}, "
        f"metric {stats.metric}, embedder {stats.embedder} of {stats.dimension or 'no'} dimensions"
    )
    for document in documents:
        origin = origins.get(document.doc_id)
        file = "" if origin is None else f"  {printable(str(Path(origin.folder, origin.name)))}"
        click.echo(f"{len(document.text):>9,}  {printable(document.doc_id)}{file}")
    if end < stats.num_documents:
        click.echo(f"{offset + 1:,} to {end:,} of {stats.num_documents:,}; the next ones: --offset {end}")


@store.command(
    cls=Command,
    short_help="Remove documents from a store.",
    examples=[
        "ragcache store rm guide.md faq-7 --store notes.store",
        "ragcache store rm guide.md --store notes.store --forget http://127.0.0.1:8000",
    ],
)
@click.argument("ids", nargs=-1, required=True, metavar="ID...")
@store_option
@forget_option
@api_key_option
def rm(ids: tuple[str, ...], store: Path, forget_urls: tuple[str, ...], api_key: str | None, as_json: bool) -> None:
    """Remove documents by their ids; a file's name stands for all documents of that file.

    Either all of them are removed or, if one is not there, none. A file that stays where it is comes back when its
    directory is indexed again.
    """
    from ragcache_core.ingest import read_origins

    with forgetting(forget_urls, api_key) as forget_documents, _opened(store) as opened:
        origins, stored = read_origins(opened.path), set(opened.ids())
        of_file: dict[str, list[DocId]] = {}
        for doc_id, origin in origins.items():
            of_file.setdefault(origin.name, []).append(doc_id)
        wanted: dict[DocId, None] = {}
        for doc_id in ids:
            found = [doc_id] if doc_id in stored else [i for i in of_file.get(doc_id, ()) if i in stored]
            if not found:
                raise UnknownDocumentError(
                    f"{doc_id!r} is no document of {store}, nor a file that one came from: 'ragcache store ls' lists "
                    "them; nothing was removed"
                )
            wanted.update(dict.fromkeys(found))
        _remove(opened, wanted, origins)
        receipts = forget_documents(list(wanted))
        _report(store, list(wanted), len(opened), as_json=as_json, what="removed", receipts=receipts)


@store.command(
    cls=Command,
    short_help="Remove the documents whose files are gone.",
    examples=[
        "ragcache store prune --store notes.store --dry-run",
        "ragcache store prune --store notes.store",
        "ragcache store prune old-notes/ --store notes.store",
    ],
)
@click.argument("folders", nargs=-1, type=click.Path(path_type=Path), metavar="[DIR]...")
@store_option
@click.option("--dry-run", is_flag=True, help="Name what would be removed, and remove nothing.")
@forget_option
@api_key_option
def prune(
    folders: tuple[Path, ...],
    store: Path,
    dry_run: bool,
    forget_urls: tuple[str, ...],
    api_key: str | None,
    as_json: bool,
) -> None:
    """Remove the documents whose files are gone from the directories that 'ragcache index' read.

    With DIR: only from these. A directory without any file may be an unmounted one, so it must be named. Documents that
    came from no file stay.
    """
    from ragcache_core.ingest import read_origins

    with forgetting(forget_urls, api_key) as forget_documents, _opened(store, read_only=dry_run) as opened:
        stored = set(opened.ids())
        origins = read_origins(opened.path)
        by_folder: dict[str, dict[DocId, FileOrigin]] = {}
        for doc_id, origin in origins.items():
            if doc_id in stored:
                by_folder.setdefault(origin.folder, {})[doc_id] = origin
        named = [str(folder.resolve()) for folder in folders]
        for folder in named:
            if folder not in by_folder:
                known = ", ".join(sorted(by_folder)) or "none"
                raise ConfigError(f"no document of {store} came from {folder}: name one of its directories ({known})")
        gone: list[DocId] = []
        for folder in named or sorted(by_folder):
            files = set(by_folder[folder].values())
            gone_files = {origin for origin in files if origin.is_gone()}
            if len(gone_files) == len(files) and folder not in named:
                raise ConfigError(
                    f"none of the {len(files)} files of {folder} is there: mount it, or if that is meant name it, "
                    f"'ragcache store prune {folder}'; nothing was removed"
                )
            gone += [doc_id for doc_id, origin in by_folder[folder].items() if origin in gone_files]
        if not dry_run:
            _remove(opened, gone, origins)
        receipts = {} if dry_run else forget_documents(gone)
        what = "would be removed" if dry_run else "removed"
        _report(store, gone, len(opened), as_json=as_json, what=what, receipts=receipts)


def _opened(path: Path, *, read_only: bool = False) -> DocumentStore:
    """Open a store to look at it and to take out of it, which asks nothing of the embedder."""
    from ragcache_core.retrieval import DocumentStore, PrecomputedEmbedder, TfidfSvdEmbedder
    from ragcache_core.retrieval.storage.manifest import read_manifest

    manifest = read_manifest(path)
    if TfidfSvdEmbedder.from_name(manifest.embedder_name) is not None:
        return DocumentStore.open(path, read_only=read_only)
    stand_in = PrecomputedEmbedder(manifest.dimension)
    stand_in.name = manifest.embedder_name
    return DocumentStore.open(path, embedder=stand_in, read_only=read_only)


def _remove(store: DocumentStore, doc_ids: Collection[DocId], origins: dict[DocId, FileOrigin]) -> None:
    from ragcache_core.ingest import write_origins

    store.delete(doc_ids)
    removed = set(doc_ids)
    if not removed.isdisjoint(origins):
        write_origins(store.path, {doc_id: origin for doc_id, origin in origins.items() if doc_id not in removed})


def _report(
    store: Path,
    doc_ids: list[DocId],
    num_remaining: int,
    *,
    as_json: bool,
    what: str,
    receipts: Mapping[str, ForgetReceipt],
) -> None:
    if as_json:
        forgotten = {"forgotten": {url: receipt.to_dict() for url, receipt in receipts.items()}} if receipts else {}
        print_json({"store": str(store), what.replace(" ", "_"): doc_ids, "num_documents": num_remaining, **forgotten})
    else:
        for doc_id in doc_ids:
            click.echo(f"  {printable(doc_id)}", err=True)
        click.echo(f"{store}: {_count(len(doc_ids))} {what}; it holds {_count(num_remaining)}")
        for url, receipt in receipts.items():
            click.echo(f"{url}: {lines_of(receipt)[0]}")
    check_complete(receipts)


def _as_json(document: Document, origin: FileOrigin | None) -> dict[str, object]:
    return {
        "id": document.doc_id,
        "num_chars": len(document.text),
        "file": None if origin is None else str(Path(origin.folder, origin.name)),
        "metadata": dict(document.metadata),
    }


def _count(number: int) -> str:
    return f"{number:,} document" + "s" * (number != 1)
