"""``ragcache index`` over real files and real stores."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ragcache_core.cli import cli
from ragcache_core.retrieval import DocumentStore


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    folder = tmp_path / "notes"
    folder.mkdir()
    (folder / "zor.md").write_text("# Zor\n\nZor is a city on the river Mel.\n")
    (folder / "mel.txt").write_text("Mel is a river. It ends in the lake Tar.\n")
    (folder / "tar.html").write_text("<h1>Tar</h1><p>Tar is a lake without fish.</p>")
    (folder / "faq.jsonl").write_text('{"id": "faq-1", "text": "Who rules Zor? A council of nine."}\n')
    (folder / "photo.png").write_bytes(b"\x89PNG\0")
    return folder


def index(notes: Path, *options: str) -> Result:
    return CliRunner().invoke(cli, ["index", str(notes), "--store", str(store_of(notes)), *options])


def store_of(notes: Path) -> Path:
    return notes.parent / "notes.store"


def stored(notes: Path) -> dict[str, str]:
    with DocumentStore.open(store_of(notes), read_only=True) as store:
        return {document.doc_id: document.text for document in store.get(store.ids())}


def test_a_directory_becomes_a_store_that_can_be_searched(notes: Path) -> None:
    result = index(notes)
    assert result.exit_code == 0, result.stderr
    assert "4 documents added, 1 file of other kinds passed over; it holds 4 documents" in result.stdout
    assert set(stored(notes)) == {"faq-1", "mel.txt", "tar.html", "zor.md"}
    with DocumentStore.open(store_of(notes), read_only=True) as store:
        assert store.search("Who rules Zor?", 1).documents[0].doc_id == "faq-1"


def test_progress_is_only_drawn_on_a_terminal(notes: Path) -> None:
    assert index(notes).stderr == ""
    ours, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 80))
    command = [sys.executable, "-m", "ragcache_core", "index", str(notes), "--store", str(store_of(notes))]
    done = subprocess.run(command, stderr=terminal, stdout=subprocess.PIPE, text=True, check=False)
    drawn = os.read(ours, 10_000)
    os.close(terminal)
    os.close(ours)
    assert done.returncode == 0
    assert b"reading" in drawn
    assert b"embedding" in drawn
    assert done.stdout.endswith("it holds 4 documents\n")


def test_a_second_reading_skips_what_is_unchanged_and_adds_what_is_new(notes: Path) -> None:
    index(notes)
    (notes / "new.txt").write_text("Something new about Zor.")
    result = index(notes)
    assert "1 document added, 4 unchanged" in result.stdout
    assert len(stored(notes)) == 5


def test_changed_documents_need_update(notes: Path) -> None:
    index(notes)
    before = stored(notes)
    (notes / "mel.txt").write_text("Mel is a short river now.")
    (notes / "new.txt").write_text("Something new about Zor.")
    result = index(notes)
    assert result.exit_code == 1
    assert "'mel.txt'" in result.stderr
    assert "replace what has changed with --update" in result.stderr
    assert stored(notes) == before


def test_update_replaces_changed_documents_and_removes_former_chunks(notes: Path) -> None:
    (notes / "mel.txt").write_text("Mel is a river. " * 200)
    index(notes)
    assert {"mel.txt#0", "mel.txt#1"} < set(stored(notes))
    (notes / "mel.txt").write_text("Mel is a short river now.")
    (notes / "zor.md").write_text("# Zor\n\nZor was a city.")
    (notes / "new.txt").write_text("Something new about Zor.")
    result = index(notes, "--update")
    assert "2 documents added, 1 replaced, 2 former documents removed, 2 unchanged" in result.stdout
    after = stored(notes)
    assert after["mel.txt"] == "Mel is a short river now."
    assert after["zor.md"] == "# Zor\n\nZor was a city."
    assert not any(doc_id.startswith("mel.txt#") for doc_id in after)


def test_an_unreadable_directory_is_left_out_and_its_documents_stay(notes: Path) -> None:
    private = notes / "private"
    private.mkdir()
    (private / "tar.txt").write_text("Tar is a lake.")
    assert index(notes).exit_code == 0
    (notes / "new.txt").write_text("A new text.")
    private.chmod(0)
    try:
        refused = index_without_root(notes, "--update", "--prune")
        assert refused.returncode == 1
        assert f"left out: directory '{private}' cannot be read (Permission denied)" in refused.stderr
        assert "error: 1 directory could not be read; 1 former document of bad files kept" in refused.stderr
        assert "1 document added, 4 unchanged, 1 bad left out, 1 former document of bad" in refused.stdout
        accepted = index_without_root(notes, "--update", "--prune", "--skip-errors")
        assert accepted.returncode == 0, accepted.stderr
    finally:
        private.chmod(0o700)
    assert set(stored(notes)) == {"faq-1", "mel.txt", "new.txt", "private/tar.txt", "tar.html", "zor.md"}


def index_without_root(notes: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the command without root's right to read every directory."""
    drop = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all"] if os.geteuid() == 0 else []
    command = [sys.executable, "-m", "ragcache_core", "index", str(notes), "--store", str(store_of(notes)), *options]
    return subprocess.run([*drop, *command], capture_output=True, text=True, check=False)


def test_a_file_of_the_same_name_elsewhere_does_not_replace_the_first(notes: Path, tmp_path: Path) -> None:
    index(notes)
    before = stored(notes)
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "zor.md").write_text("Another Zor.")
    command = ["index", str(tmp_path / "more"), "--store", str(store_of(notes)), "--update"]
    result = CliRunner().invoke(cli, command)
    assert result.exit_code == 1
    both = f"{notes / 'zor.md'} and again in {tmp_path / 'more' / 'zor.md'}"
    assert f"'zor.md' is in the store from {both}" in result.stderr
    assert stored(notes) == before
    (notes / "zor.md").unlink()  # it was moved
    assert CliRunner().invoke(cli, command).exit_code == 0
    assert stored(notes)["zor.md"] == "Another Zor."


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("is_accepted", [False, True])
def test_bad_documents_are_left_out_and_reported_with_exit_code_1_unless_accepted(
    notes: Path, is_accepted: bool, as_json: bool
) -> None:
    (notes / "empty.txt").write_text("")
    (notes / "latin.txt").write_bytes(b"f\xfcnf")
    result = index(notes, *["--skip-errors"] * is_accepted, *["--json"] * as_json)
    assert result.exit_code == (0 if is_accepted else 1)
    if as_json:
        assert json.loads(result.stdout)["num_bad"] == 2
    else:
        assert "4 documents added, 2 bad left out" in result.stdout
    reported = [
        "ragcache: left out: file 'empty.txt' hol",
        "ragcache: left out: file 'latin.txt' is ",
        "ragcache: error: 2 documents could not b",
    ]
    assert [line[:40] for line in result.stderr.splitlines()] == reported[: 2 if is_accepted else 3]
    assert len(stored(notes)) == 4


def test_a_damaged_index_can_be_rebuilt(notes: Path) -> None:
    index(notes)
    (damaged,) = store_of(notes).glob("index-*.faiss")
    damaged.write_bytes(b"")
    result = index(notes)
    assert result.exit_code == 1
    assert "run 'ragcache index' with --rebuild-index" in result.stderr
    assert index(notes, "--rebuild-index").exit_code == 0
    assert "4 unchanged" in index(notes).stdout


@pytest.mark.parametrize("update", [False, True])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_leaves_the_store_as_it_was(
    notes: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, update: bool
) -> None:
    from ragcache_core.retrieval import TfidfSvdEmbedder

    def interrupted(*_: object) -> None:
        signal.raise_signal(number)

    status = {signal.SIGINT: 130, signal.SIGTERM: 143}[number]
    if not update:
        with monkeypatch.context() as patch:
            patch.setattr(TfidfSvdEmbedder, "embed_documents", interrupted)
            assert index(notes).exit_code == status
        assert not store_of(notes).exists()
    index(notes)
    before = stored(notes)
    (notes / "mel.txt").write_text("Mel is a short river now.")
    (notes / "new.txt").write_text("Something new.")
    with monkeypatch.context() as patch:
        patch.setattr(TfidfSvdEmbedder, "embed_documents", interrupted)
        assert index(notes, "--update").exit_code == status
    assert stored(notes) == before
    assert index(notes, "--update").exit_code == 0
