"""The file of tenants: what it takes, what it refuses, and whose salt is whose."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import pytest

from ragcache_core.chunkstore.encryption import load_keys
from ragcache_core.errors import ConfigError
from ragcache_core.runtime.tenants import Tenants, cache_salt_for, hashed, mark_of, speculation_of
from ragcache_core.types import Tier

KEY, OTHER, SECRET = "k" * 32, "m" * 32, "p" * 32


def read(tmp_path: Path, text: str) -> Tenants:
    path = tmp_path / "tenants.toml"
    path.write_text(text)
    return Tenants.from_toml(path)


def table(name: str = "acme", keys: str = f'"{KEY}"', more: str = "") -> str:
    return f'[[tenants]]\nname = "{name}"\nkeys = [{keys}]\n{more}\n'


def collection(name: str = "handbook", ids: str = '"handbook/*", "terms.md"', more: str = "") -> str:
    return f'[[collections]]\nname = "{name}"\nids = [{ids}]\n{more}\n'


def test_a_document_is_in_the_first_collection_that_has_a_pattern_of_its_id(tmp_path: Path) -> None:
    tenants = read(tmp_path, collection(more='quota = {host = "1KiB"}') + collection("rest", '"*.md", "[ab]?"'))
    names = {doc: tenants.collection_of(doc) for doc in ("handbook/a/b.md", "terms.md", "x.md", "a1", "c1", "Terms.MD")}
    assert [*names.values()] == ["handbook", "handbook", "rest", "rest", None, None]
    assert tenants.weights() == {None: 1.0, "handbook": 1.0, "rest": 1.0}
    assert not tenants.have_keys, "a file of collections alone needs no key"
    assert read(tmp_path, table() + collection()).have_keys
    with pytest.raises(ConfigError, match=r"of collection 'handbook' is 1024 bytes of host, .* host_bytes"):
        tenants.check_fit(Tier.HOST, 1000, "host_bytes")


def test_a_key_may_be_written_as_its_hash_which_opens_nothing_itself(tmp_path: Path) -> None:
    digest = sha256(KEY.encode()).hexdigest()
    tenants = read(tmp_path, table(keys=f'"sha256:{digest}"') + table("other", f'"{OTHER}"'))
    assert tenants.digests == {hashed(KEY): "acme", hashed(OTHER): "other"}
    assert hashed(f"sha256:{digest}") not in tenants.digests
    assert hashed(digest) not in tenants.digests


def test_without_a_quota_a_tenant_has_what_others_leave_and_an_equal_share(tmp_path: Path) -> None:
    tenants = read(tmp_path, table() + table("other", f'"{OTHER}"', 'weight = 2\nquota = {disk = "1GiB"}'))
    assert [tenants.by_name["acme"].quota.of(tier) for tier in Tier] == [None, None, None]
    assert tenants.by_name["other"].quota.of(Tier.DISK) == 1 << 30
    assert type(tenants.by_name["other"].quota.of(Tier.DISK)) is int, "it is sent in reports"
    assert tenants.weights() == {None: 1.0, "acme": 1.0, "other": 2.0}
    tenants.check_fit(Tier.DISK, 1 << 30, "disk_bytes")
    with pytest.raises(ConfigError, match=r"'other' is 1073741824 bytes of disk, the tier holds 1000: .* disk_bytes"):
        tenants.check_fit(Tier.DISK, 1000, "disk_bytes")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no tenant: add"),
        ("no toml", "is not TOML"),
        ("tenants = []", "has no tenant"),
        (table("a b"), r"tenants\.0\.name is 'a b': a name has 1 to 64 letters"),
        (table("x" * 65), "a name has 1 to 64"),
        (table(keys='"short"'), r"keys\.0: a key has 16 or more characters"),
        (table(keys='"sha256:12"'), "64 small hexadecimal digits"),
        (table(keys="7"), "a key has 16"),
        (table(keys=""), r"tenants\.0\.keys"),
        (table(more="qota = 1"), r"no setting tenants\.0\.qota: a tenant has name, keys, weight and quota"),
        (table(more="quota = {ram = 1}"), r"no setting tenants\.0\.quota\.ram"),
        (table(more='quota = {host = "lots"}'), "is 'lots': write a size"),
        (table(more="quota = {host = 0}"), "quota.host"),
        (table(more="weight = 0"), r"weight is 0"),
        (table(more="weight = nan"), "weight"),
        (table() + table(), "two tenants 'acme': give both keys to one"),
        (table() + table("other"), r"keys\[0\] of 'other' is a key of 'acme' already"),
        (table(keys=f'"{KEY}", "{KEY}"'), r"keys\[1\] of 'acme' is a key of 'acme' already"),
        (table() + f'[operators]\nkeys = ["{KEY}"]', r"a key of \[operators\] is one of 'acme'"),
        (table() + "[operator]\nkeys = []", "no setting operator"),
        (table() + collection("acme"), "has 'acme' twice"),
        (collection() * 2, "has 'handbook' twice"),
        (collection(ids=""), r"collections\.0\.ids"),
        (collection(ids='""'), r"collections\.0\.ids\.0"),
        (collection(more=f'keys = ["{KEY}"]'), r"no setting collections\.0\.keys"),
        ('[[collections]]\nname = "handbook"', r"collections\.0\.ids is missing"),
    ],
)
def test_what_cannot_be_meant_is_refused_and_keys_are_not_shown(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        read(tmp_path, text)
    assert KEY not in str(raised.value)
    assert "tenants.toml" in str(raised.value)


def test_a_file_that_is_not_there_and_a_servers_key_that_is_a_tenants_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml cannot be read"):
        Tenants.from_toml(tmp_path / "none.toml")
    tenants = read(tmp_path, table())
    tenants.check_own_keys([OTHER])
    with pytest.raises(ConfigError, match="own API key is one of tenant 'acme'"):
        tenants.check_own_keys([OTHER, KEY])


def test_no_salt_and_no_speculation_of_a_tenant_is_anothers_whatever_they_say() -> None:
    said = [None, "s", "a", "b", '"', "null", "tenant-", cache_salt_for("a"), cache_salt_for("b", "s")]
    for make in (cache_salt_for, speculation_of):
        made = [make(tenant, own) for tenant in ("a", "b", "a.b", "as") for own in said]  # type: ignore[arg-type]  # strangers send anything
        assert len(set(made)) == len(made)
    assert cache_salt_for("a", "s") == cache_salt_for("a", "s")
    marks = {cache_salt_for("a", own).rpartition("-")[0] for own in ("s", "-", "b-c", None)}
    assert marks == {mark_of("a")} != {mark_of("b")}
    assert len(cache_salt_for("a" * 64, "s" * 128, secret=SECRET)) <= 128
    assert len(speculation_of("a", "s")) == 64


def test_salts_of_a_secret_do_not_follow_from_names_and_keep_their_tenants(tmp_path: Path) -> None:
    assert read(tmp_path, table()).secret == ""
    tenants = read(tmp_path, f'secret = "{SECRET}"\n' + table())
    assert tenants.secret == SECRET
    assert SECRET not in repr(tenants)
    salts = {cache_salt_for("a", own, secret=secret) for own in (None, "s") for secret in ("", SECRET, OTHER)}
    assert len(salts) == 6
    assert {salt.rpartition("-")[0] for salt in salts} == {mark_of("a")}
    with pytest.raises(ConfigError, match="secret: a secret has 32 or more characters") as raised:
        read(tmp_path, f'secret = "{SECRET[1:]}"\n' + table())
    assert SECRET[1:] not in str(raised.value)


# Who else can read it


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user of this machine can enter, as pytest's own is not."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


def put(folder: Path, text: str, mode: int) -> Path:
    path = folder / "tenants.toml"
    path.write_text(text)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o602, 0o666])
def test_a_file_that_every_user_can_access_is_refused_with_its_mode(open_folder: Path, mode: int) -> None:
    path = put(open_folder, table(), mode)
    with pytest.raises(ConfigError) as raised:
        Tenants.from_toml(path)
    for said in (f"mode {mode:04o}", f"chmod 600 {path}", "mount it read-only"):
        assert said in str(raised.value)
    link = open_folder / "link.toml"
    link.symlink_to(path)
    with pytest.raises(ConfigError, match=f"mode {mode:04o}"):
        Tenants.from_toml(link)


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o640, 0o440])
def test_a_file_of_one_user_or_group_is_taken(open_folder: Path, mode: int) -> None:
    assert Tenants.from_toml(put(open_folder, table(), mode)).by_name


def test_an_open_file_is_taken_in_a_private_folder_or_without_secrets_or_from_a_read_only_mount(
    open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Tenants.from_toml(put(open_folder, collection(), 0o644)).collections
    path = put(open_folder, table(), 0o644)
    open_folder.chmod(0o700)
    assert Tenants.from_toml(path).by_name
    open_folder.chmod(0o755)
    read_only = SimpleNamespace(f_flag=os.ST_RDONLY | os.ST_NOSUID)  # as a secret of Kubernetes, whose mode is 0644
    monkeypatch.setattr(os, "statvfs", lambda path: read_only)
    assert Tenants.from_toml(path).by_name


def test_a_key_of_the_disk_that_every_user_can_read_is_refused(open_folder: Path) -> None:
    path = put(open_folder, "A" * 43 + "=", 0o644)
    with pytest.raises(ConfigError, match=f"mode 0644.*chmod 600 {path}"):
        load_keys(path)
    path.chmod(0o600)
    assert load_keys(path) is not None
