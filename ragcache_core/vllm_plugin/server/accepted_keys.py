"""The accepted API keys with their tenants, reloaded when the tenants' file changes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from ragcache_core.errors import ConfigError
from ragcache_core.log import logger_of
from ragcache_core.runtime.api_keys import hashed, is_among
from ragcache_core.runtime.tenants import Tenants

LOOK_S = 5.0
"""Seconds between two looks at the file."""

logger = logger_of(__name__)


class AcceptedKeys:
    """Digests of keys: the server's own (operators' keys, if there are tenants), and the tenants'.

    A changed file changes keys alone. The engine has divided its memory among the tenants of the start.
    """

    def __init__(self, own: Sequence[str], tenants: Tenants | None = None) -> None:
        self._own = tuple(own)
        self._began_with = tenants
        self.has_tenants = tenants is not None and tenants.have_keys
        self.operators: tuple[bytes, ...] = ()
        self._tenants: dict[bytes, str] = {}
        self._use(tenants)

    @property
    def is_unlocked(self) -> bool:
        """Whether no route needs a key."""
        return not self.operators and not self.has_tenants

    def is_operators(self, digest: bytes | None) -> bool:
        """Return whether a key is the server's or an operator's."""
        return is_among(digest, self.operators)

    def tenant_of(self, digest: bytes | None) -> str | None:
        """Return the tenant of a key, in constant time."""
        found = None
        for known, tenant in self._tenants.items():
            if is_among(digest, [known]):
                found = tenant
        return found

    def replace(self, tenants: Tenants) -> list[str]:
        """Accept the keys of a changed file, and return the changes that need a restart.

        Raises:
            ConfigError: one of the server's own keys is a tenant's; nothing has changed then.
        """
        tenants.check_own_keys(self._own)
        self._use(tenants)
        return self._waiting(tenants)

    def _use(self, tenants: Tenants | None) -> None:
        self.operators = (*map(hashed, self._own), *(tenants.operator_digests if tenants else ()))
        known = self._began_with.by_name if self._began_with else {}
        digests = tenants.digests if tenants else {}
        self._tenants = {digest: name for digest, name in digests.items() if name in known}

    def _waiting(self, now: Tenants) -> list[str]:
        began = self._began_with
        assert began is not None
        shares = [
            f"quota or weight of {n!r}"
            for n, o in now.owners.items()
            if n in began.owners and _differs(o, began.owners[n])
        ]
        return [
            *(
                f"{'tenant' if name in now.by_name else 'collection'} {name!r}"
                for name in now.owners
                if name not in began.owners
            ),
            *shares,
            *(["secret"] if now.secret != began.secret else []),
            *(["weight of operators"] if now.operator_weight != began.operator_weight else []),
        ]


def _differs(one: object, other: object) -> bool:
    """Return whether two owners differ in settings other than keys."""
    return {**vars(one), "keys": None} != {**vars(other), "keys": None}


async def follow_file(keys: AcceptedKeys, path: Path, look_s: float = LOOK_S) -> None:
    """Update ``keys`` when the file of tenants changes; an invalid file is ignored. Does not return."""
    seen = await asyncio.to_thread(_version_of, path)
    while True:
        await asyncio.sleep(look_s)
        version = await asyncio.to_thread(_version_of, path)
        if version == seen:
            continue
        seen = version
        try:
            waiting = keys.replace(await asyncio.to_thread(Tenants.from_toml, path))
        except (ConfigError, OSError, RecursionError) as error:  # gone for a moment, or nested too deeply to be read
            logger.error(
                "RC-TENANTS-REJECTED: the file of tenants has changed and cannot be used, the keys before stay: %s",
                error,
            )
            continue
        logger.warning("RC-TENANTS-CHANGED: the keys of %s are accepted as it has them now", path)
        if waiting:
            logger.warning(
                "RC-TENANTS-RESTART: these changes of %s need a restart of the server: %s", path, ", ".join(waiting)
            )


def _version_of(path: Path) -> tuple[int, int, int, int] | None:
    """Return the version of a file: it also changes with its mode, and when Kubernetes replaces a secret's link."""
    try:
        facts = path.stat()
    except OSError:
        return None
    return facts.st_ino, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_size
