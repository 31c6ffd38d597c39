"""Keys of tenants are exchanged while the server runs; what the engine must know waits for a restart."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread

import pytest

from ragcache_core.errors import ConfigError
from ragcache_core.runtime.api_keys import hashed
from ragcache_core.runtime.tenants import Tenants
from ragcache_core.vllm_plugin.server.accepted_keys import AcceptedKeys, follow_file
from tests.support.waiting import until

SERVER, OLD, NEW, OTHER = "key-of-the-server", "o" * 32, "n" * 32, "b" * 32


def table(name: str, key: str, more: str = "") -> str:
    return f'[[tenants]]\nname = "{name}"\nkeys = ["{key}"]\n{more}\n'


def write(path: Path, *parts: str) -> Tenants:
    """Replace the file at once, as a secret of Kubernetes is."""
    new = path.with_suffix(".new")
    new.write_text("\n".join(parts), encoding="utf-8")
    new.chmod(0o600)
    new.replace(path)
    return Tenants.from_toml(path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tenants.toml"


@pytest.fixture
def keys(path: Path) -> AcceptedKeys:
    return AcceptedKeys([SERVER], write(path, table("acme", OLD), table("globex", OTHER)))


def tenants_of(keys: AcceptedKeys, *shown: str) -> list[str | None]:
    return [keys.tenant_of(hashed(key)) for key in shown]


def test_a_new_key_opens_and_the_old_one_does_not_any_more(keys: AcceptedKeys, path: Path) -> None:
    assert tenants_of(keys, OLD, NEW, OTHER) == ["acme", None, "globex"]
    assert keys.replace(write(path, table("acme", NEW), table("globex", OTHER))) == []
    assert tenants_of(keys, OLD, NEW, OTHER) == [None, "acme", "globex"]
    assert keys.is_operators(hashed(SERVER))


def test_operators_keys_are_exchanged(keys: AcceptedKeys, path: Path) -> None:
    assert not keys.is_operators(hashed(NEW))
    keys.replace(write(path, table("acme", OLD), f'[operators]\nkeys = ["{NEW}"]'))
    assert keys.is_operators(hashed(NEW))
    keys.replace(write(path, table("acme", OLD)))
    assert not keys.is_operators(hashed(NEW))


def test_a_tenant_who_has_left_the_file_is_locked_out_and_a_new_one_waits_for_the_engine(
    keys: AcceptedKeys, path: Path
) -> None:
    assert keys.replace(write(path, table("globex", OTHER), table("initech", NEW))) == ["tenant 'initech'"]
    assert tenants_of(keys, OLD, NEW, OTHER) == [None, None, "globex"]
    keys.replace(write(path, table("acme", OLD)))
    assert tenants_of(keys, OLD, OTHER) == ["acme", None], "who comes back has been known from the start"


@pytest.mark.parametrize(
    ("more", "waits"),
    [
        ("weight = 3", ["quota or weight of 'acme'"]),
        ('quota = {host = "1GiB"}', ["quota or weight of 'acme'"]),
        ("[operators]\nweight = 2", ["weight of operators"]),
        ('[[collections]]\nname = "handbook"\nids = ["h/*"]', ["collection 'handbook'"]),
    ],
)
def test_what_the_engine_must_know_is_named(keys: AcceptedKeys, path: Path, more: str, waits: list[str]) -> None:
    assert keys.replace(write(path, table("acme", NEW, more), table("globex", OTHER))) == waits
    assert tenants_of(keys, NEW) == ["acme"], "keys count at once"


def test_another_secret_waits_for_a_restart(keys: AcceptedKeys, path: Path) -> None:
    changed = write(path, f'secret = "{"s" * 32}"', table("acme", OLD), table("globex", OTHER))
    assert keys.replace(changed) == ["secret"]


def test_the_servers_own_key_for_a_tenant_is_refused_and_changes_nothing(keys: AcceptedKeys, path: Path) -> None:
    with pytest.raises(ConfigError, match="own API key"):
        keys.replace(write(path, table("acme", SERVER)))
    assert tenants_of(keys, OLD, OTHER) == ["acme", "globex"]


@contextmanager
def followed(keys: AcceptedKeys, path: Path) -> Iterator[None]:
    """Follow the file in a thread; it goes on whatever becomes of the file."""
    loop = asyncio.new_event_loop()
    following = loop.create_task(follow_file(keys, path, look_s=0.01))
    with suppress(TimeoutError):  # it has looked at the file as it is
        loop.run_until_complete(asyncio.wait_for(asyncio.shield(following), 0.1))

    def run() -> None:
        with suppress(asyncio.CancelledError):
            loop.run_until_complete(following)
        loop.close()

    thread = Thread(target=run)
    thread.start()
    try:
        yield
        assert not following.done()
    finally:
        loop.call_soon_threadsafe(following.cancel)
        thread.join()


def test_a_changed_file_is_read_and_a_broken_or_missing_one_keeps_the_last_keys(
    keys: AcceptedKeys, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[object] = []
    monkeypatch.setattr(
        "ragcache_core.vllm_plugin.server.accepted_keys.logger.error", lambda *said: refused.append(said)
    )
    changed: list[object] = []
    monkeypatch.setattr(
        "ragcache_core.vllm_plugin.server.accepted_keys.logger.warning", lambda *said: changed.append(said)
    )
    with followed(keys, path):
        for number, broken in enumerate(["[[tenants", table("acme", "short"), "a=" + "[" * 5000, None]):
            path.unlink() if broken is None else path.write_text(broken, encoding="utf-8")
            assert until(lambda number=number: len(refused) > number)
            assert tenants_of(keys, OLD, OTHER) == ["acme", "globex"]
        write(path, table("acme", NEW), table("globex", OTHER))
        assert until(lambda: tenants_of(keys, OLD, NEW, OTHER) == [None, "acme", "globex"])
        changed.clear()
        path.chmod(0o640)  # as a rejected file is mended
        assert until(lambda: bool(changed)), "the mode alone has changed"
