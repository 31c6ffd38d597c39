"""Cache salts by access groups: only prompts with the same groups share KV."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Iterable

_RIGHTS = re.compile(r"acl-[0-9a-f]{64}")


def rights_salt(acls: Iterable[tuple[str, ...]]) -> str | None:
    """Return the salt of a prompt whose documents have these groups; ``None`` if all clients may read them.

    The KV of a document depends on its whole prefix, so access rights are those of a whole prompt: it shares KV with
    prompts of the same rights. The salt is made of the groups of each document, as a set of sets: a document for ``hr``
    and one for ``legal`` give another salt than one document that both may read, which a reader in ``hr`` alone may
    see.
    """
    groups = sorted(set(acls))
    return f"acl-{_digest(groups)}" if groups else None


def joined_salt(salts: Iterable[str]) -> str | None:
    """Return the salt of a request with several: the last one, combined with that of its access groups."""
    own = rights = None
    for salt in salts:
        own, rights = (own, salt) if is_rights_salt(salt) else (salt, rights)
    if own is None or rights is None:
        return own if rights is None else rights
    return f"acl-{_digest([own, rights])}"


def is_rights_salt(salt: object) -> bool:
    """Return whether a salt names access groups."""
    return isinstance(salt, str) and _RIGHTS.fullmatch(salt) is not None


def private_salt() -> str:
    """Return a salt that no other request has."""
    return f"private-{secrets.token_hex(16)}"


def _digest(parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
