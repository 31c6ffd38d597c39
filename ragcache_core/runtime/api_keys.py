"""Whether who asks a server over HTTP has its key."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable


def hashed(key: str) -> bytes:
    """Return the SHA-256 of an API key as somebody shows it: who has but the hash does not get in with it."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def shown_digest(authorization: str) -> bytes | None:
    """Return the hash of the key in a header ``Authorization``, None if it holds no bearer token."""
    scheme, _, key = authorization.partition(" ")
    return hashed(key) if scheme.lower() == "bearer" else None


def is_among(shown: bytes | None, digests: Iterable[bytes]) -> bool:
    """Return whether a key is one of those. A wrong one takes as long as a right one."""
    return shown is not None and any(secrets.compare_digest(shown, known) for known in digests)


class ApiKeys:
    """The keys of a server, of which a request needs one as a bearer token; where there are none it needs none."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [hashed(key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def admit(self, authorization: str) -> bool:
        """Return whether a header ``Authorization`` holds one of them."""
        return not self._digests or is_among(shown_digest(authorization), self._digests)
