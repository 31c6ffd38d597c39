"""API keys of a server: the digests it keeps, and the comparison with the key of a request."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable


def hashed(key: str) -> bytes:
    """Return the SHA-256 of a request's API key; the hash itself is no key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def shown_digest(authorization: str) -> bytes | None:
    """Return the hash of the key in a header ``Authorization``; ``None`` without a bearer token."""
    scheme, _, key = authorization.partition(" ")
    return hashed(key) if scheme.lower() == "bearer" else None


def is_among(shown: bytes | None, digests: Iterable[bytes]) -> bool:
    """Return whether a key is among those, in constant time."""
    return shown is not None and any(secrets.compare_digest(shown, known) for known in digests)
