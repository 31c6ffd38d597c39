"""``ragcache store`` over real stores."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from ragcache_core.cli import cli
from ragcache_core.retrieval import DocumentStore
from ragcache_core.types import Document


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    folder = tmp_path / "notes"
    folder.mkdir()
    for name in ("zor", "mel", "tar"):
        (folder / f"{name}.txt").write_text(f"{name} is a place.")
    lines = [{"id": f"faq-{i}", "text": f"Answer {i}.", "metadata": {"source": "elsewhere"}} for i in range(2)]
    (folder / "faq.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (folder / "long.txt").write_text("A river is long. " * 200)
    assert run("index", str(folder), store=store_of(folder)).exit_code == 0
    return folder


def run(*arguments: str, store: Path) -> Result:
    return CliRunner().invoke(cli, [*arguments, "--store", str(store)])


def store_of(notes: Path) -> Path:
    return notes.parent / "notes.store"


def ids(notes: Path) -> set[str]:
    with DocumentStore.open(store_of(notes), read_only=True) as store:
        return set(store.ids())


ALL = {"faq-0", "faq-1", "long.txt#0", "long.txt#1", "long.txt#2", "mel.txt", "tar.txt", "zor.txt"}


def test_documents_are_listed_by_pages_with_their_sizes_and_files(notes: Path) -> None:
    first = run("store", "ls", "--limit", "5", store=store_of(notes)).stdout.splitlines()
    assert "8 documents" in first[0]
    assert "embedder" in first[0]
    assert first[-1] == "1 to 5 of 8; the next ones: --offset 5"
    second = run("store", "ls", "--limit", "5", "--offset", "5", store=store_of(notes)).stdout.splitlines()
    rows = [line.split() for line in first[1:-1] + second[1:]]
    assert {row[1] for row in rows} == ALL
    assert next(row for row in rows if row[1] == "zor.txt") == ["15", "zor.txt", str(notes / "zor.txt")]
    assert run("store", "ls", "--offset", "8", store=store_of(notes)).exit_code == 0


def test_documents_are_removed_by_id_or_by_file_all_or_none(notes: Path) -> None:
    result = run("store", "rm", "zor.txt", "nowhere", store=store_of(notes))
    assert result.exit_code == 1
    assert "'nowhere' is no document of" in result.stderr
    assert ids(notes) == ALL
    result = run("store", "rm", "zor.txt", "faq-1", "long.txt", store=store_of(notes))
    assert "5 documents removed; it holds 3 documents" in result.stdout
    assert ids(notes) == {"faq-0", "mel.txt", "tar.txt"}
    removed = json.loads(run("store", "rm", "mel.txt", "--json", store=store_of(notes)).stdout)
    assert (removed["removed"], removed["num_documents"]) == (["mel.txt"], 2)


def test_the_documents_of_files_that_are_gone_are_pruned_and_no_others(notes: Path) -> None:
    with DocumentStore.open(store_of(notes)) as store:
        store.add([Document("by-hand", "Added by an application.", {"source": "zor.txt", "chunk": 0})])
    (notes / "zor.txt").unlink()
    (notes / "faq.jsonl").unlink()
    (notes / "long.txt").unlink()
    wanted = {"faq-0", "faq-1", "long.txt#0", "long.txt#1", "long.txt#2", "zor.txt"}
    foreseen = json.loads(run("store", "prune", "--dry-run", "--json", store=store_of(notes)).stdout)
    assert set(foreseen["would_be_removed"]) == wanted
    assert ids(notes) == ALL | {"by-hand"}
    result = run("store", "prune", store=store_of(notes))
    assert "6 documents removed; it holds 3 documents" in result.stdout
    assert ids(notes) == {"by-hand", "mel.txt", "tar.txt"}
    assert "0 documents removed" in run("store", "prune", store=store_of(notes)).stdout


def test_a_directory_that_is_not_mounted_is_not_taken_for_empty(notes: Path, tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "oru.txt").write_text("Oru is a place.")
    run("index", str(tmp_path / "more"), store=store_of(notes))
    notes.rename(tmp_path / "elsewhere")
    result = run("store", "prune", store=store_of(notes))
    assert result.exit_code == 1
    assert f"none of the 5 files of {notes} exists: mount the directory, or" in result.stderr
    assert ids(notes) == ALL | {"oru.txt"}
    assert "8 documents removed; it holds 1 document" in run("store", "prune", str(notes), store=store_of(notes)).stdout
    unknown = run("store", "prune", str(tmp_path / "elsewhere"), store=store_of(notes))
    assert f"name one of its directories ({tmp_path / 'more'})" in unknown.stderr


def test_a_store_with_an_embedder_of_ones_own_needs_it_for_none_of_this(tmp_path: Path) -> None:
    class Mine:
        name = "mine"
        dimension = 2

        def embed_documents(self, texts: list[str]) -> np.ndarray:
            return np.ones((len(texts), 2), np.float32)

        def embed_query(self, text: str) -> np.ndarray:
            return np.ones(2, np.float32)

    with DocumentStore.create(tmp_path / "s", embedder=Mine()) as store:
        store.add([Document("a", "A."), Document("b", "B.")])
    assert "embedder mine of 2 dimensions" in run("store", "ls", store=tmp_path / "s").stdout
    assert run("store", "rm", "a", store=tmp_path / "s").exit_code == 0
    with DocumentStore.open(tmp_path / "s", embedder=Mine()) as store:
        assert store.search("B", 1).documents[0].doc_id == "b"
