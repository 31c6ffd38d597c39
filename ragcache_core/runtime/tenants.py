"""Tenants and collections of an engine: owners of API keys, shared KV, and shares of each tier."""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from ragcache_core.config import Bytes
from ragcache_core.errors import ConfigError, quoted
from ragcache_core.private_files import check_not_exposed
from ragcache_core.runtime.api_keys import hashed
from ragcache_core.types import DocId, Tier

MAX_SALT_CHARS = 128
"""Of a client's own ``cache_salt``, as vLLM takes it."""
_HASHED = "sha256:"
_HASH = re.compile(r"sha256:[0-9a-f]{64}")
_MIN_KEY_CHARS = 16
_MIN_SECRET_CHARS = 32
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


def _check_name(value: object) -> object:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ValueError("a name has 1 to 64 letters, digits, '-', '_' or '.', and begins with a letter or a digit")
    return value


def _check_key(value: object) -> object:
    if isinstance(value, str) and value.startswith(_HASHED):
        if _HASH.fullmatch(value):
            return value
        raise ValueError("a hash is 'sha256:' and the 64 small hexadecimal digits of the key's SHA-256")
    if not isinstance(value, str) or len(value) < _MIN_KEY_CHARS or not value.isprintable() or " " in value:
        raise ValueError(
            f"a key has {_MIN_KEY_CHARS} or more characters and no blanks, as of 'openssl rand -hex 32', or is "
            "'sha256:' and its SHA-256"
        )
    return value


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class Quota(_Table):
    """Maximum bytes of each tier for a tenant or collection; ``None`` for no limit."""

    gpu: Bytes | None = None
    host: Bytes | None = None
    disk: Bytes | None = None

    def of(self, tier: Tier) -> int | None:
        """Return the limit in one tier, in bytes."""
        limit = getattr(self, tier.label)
        return None if limit is None else int(limit)  # a ByteSize cannot be sent on


class Tenant(_Table):
    """A tenant, identified by ``keys``. A full tier is divided by ``weight``; see :class:`Quota`.

    A ``restricted`` tenant has documents that not everybody may read: its plain requests share no KV from the start,
    and not only from the first registration of such a document on.
    """

    name: Annotated[str, BeforeValidator(_check_name)]
    keys: Annotated[list[Annotated[str, BeforeValidator(_check_key)]], Field(min_length=1)]
    weight: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] = 1.0
    quota: Quota = Quota()
    restricted: bool = False


class Collection(_Table):
    """Documents whose ids match shell patterns ``ids``, in requests without a tenant."""

    name: Annotated[str, BeforeValidator(_check_name)]
    ids: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]
    weight: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] = 1.0
    quota: Quota = Quota()


class _Operators(_Table):
    keys: list[Annotated[str, BeforeValidator(_check_key)]] = []
    weight: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] = 1.0
    restricted: bool = False


def _check_secret(value: object) -> object:
    if not isinstance(value, str) or len(value) < _MIN_SECRET_CHARS:
        raise ValueError(f"a secret has {_MIN_SECRET_CHARS} or more characters, as of 'openssl rand -hex 32'")
    return value


class _File(_Table):
    secret: Annotated[str, BeforeValidator(_check_secret)] = ""
    tenants: list[Tenant] = []
    collections: list[Collection] = []
    operators: _Operators = _Operators()


@dataclass(frozen=True, slots=True)
class Tenants:
    """The tenants of a file by name, and its collections for requests without a tenant.

    Requests with an operator's key are no tenant's, and may do everything.

    ::

        secret = "0b7c..."                      # makes salts unguessable; without it, they come from the name alone

        [[tenants]]
        name = "acme"
        keys = ["sha256:9f86d0..."]             # or the key itself
        weight = 2                              # a full tier is shared by weight; 1 by default
        quota = {host = "8GiB", disk = "64GiB"} # the most that it may fill; without it, what others leave

        [operators]
        keys = ["..."]                          # besides the server's own

        [[collections]]
        name = "handbook"
        ids = ["handbook/*"]                    # which documents: patterns of their ids
        quota = {disk = "16GiB"}
    """

    secret: str = field(repr=False)
    by_name: Mapping[str, Tenant]
    operator_digests: tuple[bytes, ...]
    operator_weight: float
    digests: Mapping[bytes, str]
    collections: Mapping[str, Collection]
    restricted: frozenset[str | None] = frozenset()
    """Tenants, and None for operators, that have documents which not everybody may read."""

    @property
    def have_keys(self) -> bool:
        """Whether keys identify clients; a file of collections alone needs no keys."""
        return bool(self.digests or self.operator_digests)

    @classmethod
    def from_toml(cls, path: str | Path) -> Self:
        """Return the tenants of a file.

        Raises:
            ConfigError: it cannot be read, every user of this machine can read it, a setting has a value that cannot
                work, or two tenants have the same name or key. Keys are not shown.
        """
        try:
            table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"{path} cannot be read ({error.strerror}): name a TOML file of tenants") from error
        except ValueError as error:
            raise ConfigError(f"{path} is not TOML ({error}): correct it; it has [[tenants]] tables") from error
        try:
            file = _File(**table)
        except ValidationError as error:
            raise ConfigError(f"{path}: {_problem(error)}") from error
        if file.secret or file.tenants or file.operators.keys:
            check_not_exposed(Path(path))
        return cls._of(file, path)

    @classmethod
    def _of(cls, file: _File, path: str | Path) -> Self:
        if not file.tenants and not file.collections:
            raise ConfigError(f"{path} has no tenant: add [[tenants]] with name and keys, or [[collections]]")
        by_name: dict[str, Tenant] = {}
        digests: dict[bytes, str] = {}
        for tenant in file.tenants:
            if tenant.name in by_name:
                raise ConfigError(f"{path} has two tenants {tenant.name!r}: give both keys to one of them")
            by_name[tenant.name] = tenant
            for number, key in enumerate(tenant.keys):
                digest = key_digest(key)
                if (other := digests.get(digest)) is not None:
                    raise ConfigError(
                        f"{path}: keys[{number}] of {tenant.name!r} is a key of {other!r} already: a key is one "
                        "tenant's, so make another"
                    )
                digests[digest] = tenant.name
        operators = tuple(map(key_digest, file.operators.keys))
        if both := [digests[digest] for digest in operators if digest in digests]:
            raise ConfigError(f"{path}: a key of [operators] is one of {both[0]!r}, too: make another")
        collections: dict[str, Collection] = {}
        for collection in file.collections:
            if collection.name in collections or collection.name in by_name:
                raise ConfigError(
                    f"{path} has {collection.name!r} twice: tenants and collections have names of their own"
                )
            collections[collection.name] = collection
        restricted: set[str | None] = {tenant.name for tenant in file.tenants if tenant.restricted}
        if file.operators.restricted:
            restricted.add(None)
        return cls(file.secret, by_name, operators, file.operators.weight, digests, collections, frozenset(restricted))

    def check_own_keys(self, keys: Iterable[str]) -> None:
        """Reject server ``keys`` that belong to a tenant.

        Raises:
            ConfigError: one is.
        """
        for key in keys:
            if (name := self.digests.get(hashed(key))) is not None:
                raise ConfigError(f"the server's own API key is one of tenant {name!r}: make another")

    def check_fit(self, tier: Tier, capacity_bytes: int, setting: str) -> None:
        """Reject quotas above a whole tier.

        Raises:
            ConfigError: one is; ``setting`` is what would have to be raised.
        """
        for owner in self.owners.values():
            if (limit := owner.quota.of(tier)) is not None and limit > capacity_bytes:
                kind = "tenant" if isinstance(owner, Tenant) else "collection"
                raise ConfigError(
                    f"the quota of {kind} {owner.name!r} is {limit} bytes of {tier.label}, the tier holds "
                    f"{capacity_bytes}: lower quota.{tier.label}, or raise {setting}"
                )

    @property
    def owners(self) -> Mapping[str, Tenant | Collection]:
        """The owners with a share of each tier, by name."""
        return {**self.by_name, **self.collections}

    def weights(self) -> dict[str | None, float]:
        """Return the weights by which a full tier is divided; all KV without owner is one party."""
        return {None: self.operator_weight, **{name: owner.weight for name, owner in self.owners.items()}}

    def collection_of(self, doc_id: DocId) -> str | None:
        """Return the first collection that contains a document."""
        for name, collection in self.collections.items():
            if any(fnmatchcase(doc_id, pattern) for pattern in collection.ids):
                return name
        return None


def key_digest(key: str) -> bytes:
    """Return the SHA-256 of an API key in the file, which may be given as such."""
    return bytes.fromhex(key.removeprefix(_HASHED)) if _HASH.fullmatch(key) else hashed(key)


def cache_salt_for(tenant: str, cache_salt: str | None = None, *, secret: str = "") -> str:
    """Return the salt of a tenant's requests, unique to the tenant for any salt of the request.

    Without the file's ``secret`` any client can derive it from the name, and send it to a server without tenants.

    The engine knows a request's tenant by the salt's beginning, :func:`mark_of`. vLLM passes a salt wherever KV is
    looked up, but drops a request's other fields where it makes requests of its own, as in a beam search.
    """
    told = _digest("salt", tenant, cache_salt)
    if secret:
        told = hmac.digest(secret.encode(), told.encode(), "sha256").hex()
    return f"{mark_of(tenant)}-{told}"


def mark_of(tenant: str) -> str:
    """Return the beginning of a tenant's salts, up to the last ``-``."""
    return f"tenant-{_digest('mark', tenant)[:32]}"


def speculation_of(tenant: str, speculation: str) -> str:
    """Return the engine's id of a tenant's speculation, unique to the tenant for any given id."""
    return _digest("speculation", tenant, speculation)


def _digest(*parts: str | None) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _problem(error: ValidationError) -> str:
    first = error.errors()[0]
    said = first["msg"].removeprefix("Value error, ")
    place = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return (
            f"there is no setting {place}: a tenant has name, keys, weight and quota = {{gpu, host, "
            "disk}, and may be restricted; a collection has ids instead of keys"
        )
    if first["type"] == "missing":
        return f"{place} is missing: each of [[tenants]] has a name and keys, each of [[collections]] a name and ids"
    shown = "" if {"keys", "secret"} & set(first["loc"]) else f" is {quoted(first['input'])}"
    return f"{place}{shown}: {said}"
