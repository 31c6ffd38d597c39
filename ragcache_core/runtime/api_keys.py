"""Whether who asks a server over HTTP has its key."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence


class ApiKeys:
    """The keys of a server, of which a request needs one as a bearer token; where there are none it needs none."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def admit(self, authorization: str) -> bool:
        """Return whether a header ``Authorization`` holds one of them. A wrong one takes as long as a right one."""
        if not self._digests:
            return True
        scheme, _, key = authorization.partition(" ")
        digest = _digest(key)
        return scheme.lower() == "bearer" and any(secrets.compare_digest(digest, known) for known in self._digests)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
