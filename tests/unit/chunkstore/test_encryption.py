"""An encrypted store: what is on disk says nothing without the key, and what was changed there is a miss."""

from __future__ import annotations

import base64
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.exceptions import InvalidTag

from ragcache_core.chunkstore import ChunkStore
from ragcache_core.chunkstore.encryption import KEY_ENV, Keys, load_keys
from ragcache_core.errors import CacheCapacityError, CacheDirectoryError, ConfigError

from .conftest import CHUNK_BYTES, IDENTITY, Opening, keys, payload, read, unlink_failing_after, writes
from .test_damage import turn_bit

FIRST, SECOND, THIRD = (Keys((bytes([number]) * 32,)) for number in (1, 2, 3))


def both(new: Keys, old: Keys) -> Keys:
    return Keys((*new.secrets, *old.secrets))


def test_every_object_has_a_key_of_its_own_which_its_name_and_ours_make() -> None:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    encrypted = FIRST.encrypt(b"chunk", b"name")
    assert FIRST.decrypt(encrypted, b"name") == b"chunk"
    assert both(SECOND, FIRST).decrypt(encrypted, b"name") == b"chunk"
    assert [keys.decrypt(encrypted, name) for keys, name in ((FIRST, b"other"), (SECOND, b"name"))] == [None, None]
    with pytest.raises(InvalidTag):
        AESGCM(FIRST.secrets[0]).decrypt(encrypted[4:16], encrypted[16:], b"name")
    assert FIRST.encrypt(b"chunk", b"name")[4:16] != encrypted[4:16]


def test_objects_have_names_that_the_last_key_alone_makes() -> None:
    assert both(SECOND, FIRST).name_of(b"chunk") == FIRST.name_of(b"chunk") != SECOND.name_of(b"chunk")
    assert FIRST.name_of(b"chunk") != FIRST.name_of(b"other")


@pytest.fixture
def encrypted(opening: Opening) -> Callable[..., ChunkStore]:
    return lambda using=FIRST, **settings: opening(keys=using, **settings)


def test_chunks_come_back_as_they_were_also_after_a_restart(encrypted: Callable[..., ChunkStore]) -> None:
    store = encrypted()
    store.write_many(writes(keys(8)))
    assert [read(store, key) for key in keys(8)] == [payload(key) for key in keys(8)]
    store.close()
    store = encrypted()
    assert [read(store, key) for key in keys(8)] == [payload(key) for key in keys(8)]
    assert store.stats.num_damaged == 0


def test_no_part_of_a_chunk_is_in_a_file(encrypted: Callable[..., ChunkStore]) -> None:
    store = encrypted()
    store.write_many(writes(keys(8)))
    store.close()
    on_disk = b"".join(path.read_bytes() for path in store.path.iterdir() if path.is_file())
    assert len(on_disk) > 8 * CHUNK_BYTES
    for key in keys(8):
        parts = [payload(key)[start : start + 16] for start in range(0, CHUNK_BYTES, 16)]
        assert not any(part in on_disk for part in parts)


def test_the_same_chunk_looks_different_each_time(encrypted: Callable[..., ChunkStore]) -> None:
    store, seen = encrypted(num_slots=1), []
    for _ in range(2):
        store.write_many(writes(keys(1)))
        seen.append((store.path / "chunks.data").read_bytes()[: store.slot_bytes])
        store.delete_many(keys(1))
    assert seen[0] != seen[1]


@pytest.mark.parametrize(
    ("name", "offset"),
    [
        *(("chunks.data", CHUNK_BYTES + at) for at in (0, 4000, CHUNK_BYTES - 1)),
        *(("chunks.headers", 32 + at) for at in (0, 5, 16, 31)),
    ],
)
def test_a_bit_that_was_turned_anywhere_is_a_miss(encrypted: Callable[..., ChunkStore], name: str, offset: int) -> None:
    store = encrypted()
    store.write_many(writes(keys(3)))
    turn_bit(store.path / name, offset)
    assert [read(store, key) for key in keys(3)] == [payload(b"key 0"), None, payload(b"key 2")]
    assert store.stats.num_damaged == 1


def test_missing_headers_are_misses(encrypted: Callable[..., ChunkStore]) -> None:
    with encrypted() as store:
        store.write_many(writes(keys(3)))
        (store.path / "chunks.headers").write_bytes((store.path / "chunks.headers").read_bytes()[:40])
        assert [read(store, key) is not None for key in keys(3)] == [True, False, False]


def test_slots_of_another_cache_with_the_same_key_are_misses(
    folder: Path, encrypted: Callable[..., ChunkStore]
) -> None:
    store = encrypted()
    store.write_many(writes(keys(2)))
    store.close()
    identity: dict[str, Any] = {**IDENTITY, "weights": "another"}
    arguments: dict[str, Any] = {"chunk_bytes": CHUNK_BYTES, "capacity_bytes": 16 * CHUNK_BYTES, "keys": FIRST}
    with ChunkStore(folder, identity, **arguments) as other:
        other.write_many(writes(keys(2)))
    for name in ("chunks.data", "chunks.headers"):
        shutil.copy(store.path / name, other.path / name)
    with ChunkStore(folder, identity, **arguments) as other:
        assert [read(other, key) for key in keys(2)] == [None, None]


def test_a_wrong_key_is_refused_and_nothing_is_lost(encrypted: Callable[..., ChunkStore]) -> None:
    store = encrypted(FIRST)
    store.write_many(writes(keys(2)))
    store.close()
    with pytest.raises(CacheDirectoryError, match=r"is encrypted with the key [0-9a-f]{8}, and the keys.*further line"):
        encrypted(SECOND)
    assert read(encrypted(FIRST), b"key 0") == payload(b"key 0")


def test_a_key_is_replaced_while_its_chunks_stay_readable(encrypted: Callable[..., ChunkStore]) -> None:
    with encrypted(FIRST) as store:
        store.write_many(writes(keys(2)))
    with encrypted(both(SECOND, FIRST)) as store:
        store.write_many(writes(keys(2, first=2)))
        assert [read(store, key) for key in keys(4)] == [payload(key) for key in keys(4)]
    with encrypted(SECOND) as store:  # without the old one, its chunks are misses
        assert [read(store, key) is not None for key in keys(4)] == [False, False, True, True]
    with pytest.raises(CacheDirectoryError, match="is encrypted with the key"):
        encrypted(both(THIRD, FIRST))


def test_what_was_there_unencrypted_goes_when_a_key_is_given(
    opening: Opening, encrypted: Callable[..., ChunkStore]
) -> None:
    plain = opening()
    plain.write_many(writes(keys(2)))
    plain.close()
    store = encrypted()
    assert not plain.path.exists()
    assert [read(store, key) for key in keys(2)] == [None, None]


def opened_as(folder: Path, *, keys: Keys | None = None, **identity: str) -> ChunkStore:
    settings: dict[str, Any] = {"chunk_bytes": CHUNK_BYTES, "capacity_bytes": 16 * CHUNK_BYTES, "keys": keys}
    return ChunkStore(folder, {**IDENTITY, **identity}, match_keys=("model",), **settings)


def written_as(folder: Path, *, keys: Keys | None = None, **identity: str) -> Path:
    """Return the folder of a store with chunks, which is closed."""
    with opened_as(folder, keys=keys, **identity) as store:
        store.write_many(writes([b"key 0"]))
    return store.path


def plain_files(folder: Path) -> list[Path]:
    return [p for p in folder.rglob("*") if p.is_file() and payload(b"key 0")[:64] in p.read_bytes()]


def test_what_other_identities_and_workers_left_unencrypted_goes_when_a_key_is_given(folder: Path) -> None:
    written_as(folder, vllm="0.32")
    written_as(folder, model="another")
    written_as(folder / "worker-1", vllm="0.32")
    written_as(folder / "worker-1" / "engine-1", vllm="0.32")
    (written_as(folder, vllm="0.31") / "ragcache-namespace").unlink()
    (written_as(folder, vllm="0.30") / "identity.json").write_text("")
    encrypted = written_as(folder, keys=FIRST, vllm="0.33")
    assert plain_files(folder) == []
    with opened_as(folder, keys=FIRST, vllm="0.34"):
        assert encrypted.exists()


def test_what_is_unencrypted_and_cannot_be_deleted_refuses_the_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = written_as(folder, vllm="0.32")

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", unlink_failing_after(0, OSError(errno.EROFS, "Read-only file system")))
        with pytest.raises(CacheDirectoryError, match=f"{plain} holds KV from before encryption.*Read-only.*delete it"):
            opened_as(folder, keys=FIRST, vllm="0.33")
    opened_as(folder, keys=FIRST, vllm="0.33").close()
    assert plain_files(folder) == []


def test_what_is_unencrypted_and_not_ours_to_delete_is_named(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    newer = written_as(folder, vllm="1.0")
    (newer / "identity.json").write_text('{"format": 99, "identity": {}}')
    mixed = written_as(folder, vllm="0.32")
    (mixed / "ragcache-namespace").unlink()
    (mixed / "notes.txt").write_text("of another program")
    with opened_as(folder, model="another") as in_use:
        in_use.write_many(writes(keys(1)))
        opened_as(folder, keys=FIRST, vllm="0.33").close()
        assert read(in_use, b"key 0") == payload(b"key 0")
    left = [line for line in caplog.messages if "has KV that is not encrypted" in line]
    assert sorted(line.split()[1] for line in left) == sorted(map(str, (newer, mixed, in_use.path)))
    assert (mixed / "notes.txt").exists()


def test_a_store_without_a_key_does_not_find_what_is_encrypted(
    opening: Opening, encrypted: Callable[..., ChunkStore]
) -> None:
    with encrypted() as store:
        store.write_many(writes(keys(2)))
    plain = opening()
    assert [read(plain, key) for key in keys(2)] == [None, None]


def test_a_start_that_is_refused_for_its_capacity_notes_no_new_key(encrypted: Callable[..., ChunkStore]) -> None:
    with encrypted() as store:
        store.write_many(writes(keys(2)))
    with pytest.raises(CacheCapacityError):
        encrypted(both(SECOND, FIRST), num_slots=0)
    with encrypted() as store:
        assert read(store, b"key 0") == payload(b"key 0")


@pytest.mark.parametrize("damage", [b"", b"\0" * 8, b"no key's name"])
def test_a_note_of_the_key_that_says_nonsense_is_no_wrong_key(
    encrypted: Callable[..., ChunkStore], damage: bytes
) -> None:
    with encrypted() as store:
        store.write_many(writes(keys(2)))
    (store.path / "encryption-key").write_bytes(damage)
    with encrypted() as store:
        assert read(store, b"key 0") == payload(b"key 0")
    with pytest.raises(CacheDirectoryError, match="is encrypted with the key"):
        encrypted(SECOND)


def line(secret: bytes) -> str:
    return base64.b64encode(secret).decode()


def test_keys_come_from_a_file_with_the_one_in_use_first_or_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(KEY_ENV, raising=False)
    assert load_keys(None) is None
    path = tmp_path / "key"
    path.write_text(f"# since May\n{line(b'a' * 32)}\n\n{line(b'b' * 32)}\n")
    found = load_keys(path)
    assert found is not None
    assert found.secrets == (b"a" * 32, b"b" * 32)
    monkeypatch.setenv(KEY_ENV, line(b"c" * 32))
    from_environment = load_keys(None)
    assert from_environment is not None
    assert from_environment.secrets == (b"c" * 32,)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no key"),
        ("# nothing", "holds no key"),
        ("not base64!", "line 1 of .* is no base64"),
        (line(b"a" * 16), "line 1 of .* is a key of 16 bytes"),
        (f"{line(b'a' * 32)}\n{line(b'b' * 33)}", "line 2 of .* is a key of 33 bytes"),
    ],
)
def test_a_file_without_a_key_is_refused_and_its_content_is_not_shown(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "key"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words) as refused:
        load_keys(path)
    assert "openssl rand -base64 32" in str(refused.value)
    assert not any(part in str(refused.value) for part in text.split() if len(part) > 12)


def test_keys_do_not_show_in_a_log() -> None:
    assert "\\x01" not in repr(FIRST)
    assert line(FIRST.secrets[0]) not in repr(FIRST)
