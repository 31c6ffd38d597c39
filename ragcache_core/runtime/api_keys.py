"""API keys of a server: the digests it keeps, and the comparison with the key of a request."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable

from ragcache_core.errors import ConfigError

_SENDABLE = re.compile(r"[!-~]([ -~]*[!-~])?")
"""What a header can carry: printable ASCII, without space at its ends."""


def check_api_key(key: str | None) -> None:
    """Reject a key that no request can carry. The message does not show the key.

    Raises:
        ConfigError: it begins or ends with white space, or has control characters or others than ASCII.
    """
    if not key or _SENDABLE.fullmatch(key):
        return
    place, character = next(
        (at, each) for at, each in enumerate(key) if not "!" <= each <= "~" and (each != " " or at in (0, len(key) - 1))
    )
    raise ConfigError(
        f"character {place + 1} of {len(key)} of the API key is {character!a}, which no request can carry: use "
        "printable ASCII without space at the ends (files of secrets often end with a line feed: use printf, or "
        "kubectl's --from-literal)"
    )


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
