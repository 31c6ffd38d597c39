"""The objects of a shared store: a chunk's bytes, their age, and a checksum.

::

    |payload: length|computed at: 8, a float|length: 8|codec: 1|format: 1|XXH3: 16|

Objects of a RAGCache before had no length, codec and format: they are read as well, and were always raw.

With keys an object is sealed with AES-256-GCM, and so authenticated with its name; without the key the name reveals
nothing of the tokens. Without keys, write access to the store allows any bytes with a valid checksum, and a list of its
objects shows whether a guessed text is there.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Mapping

import numpy as np
import xxhash

from ragcache_core.chunkstore.sealing import Keys

_NAME_FORMAT = 2
_TIME = struct.Struct("<d")
_RECORD = struct.Struct("<dQBB")
_RECORD_FORMAT = 3
_RAW = 0
_DIGEST_BYTES = 16


class Objects:
    """Names, packs and unpacks the objects of one identity; another identity or format has other names.

    Args:
        identity: everything that a chunk's bytes depend on besides its key, the same on every machine.
        chunk_bytes: of a chunk.
        keys: seal the objects; None leaves them open.
    """

    def __init__(self, identity: Mapping[str, str | int], chunk_bytes: int, keys: Keys | None) -> None:
        said = {**identity, "chunk_bytes": chunk_bytes, "format": _NAME_FORMAT, "is_sealed": keys is not None}
        self.prefix = f"ragcache/{hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:32]}"
        self.chunk_bytes = chunk_bytes
        self._keys = keys

    def name_of(self, chunk: bytes) -> str:
        """Return the name of a chunk's object."""
        name = chunk if self._keys is None else self._keys.name_of(chunk)
        return f"{self.prefix}/{name.hex()}"

    def pack(self, name: str, payload: bytes, computed_s: float) -> bytes:
        """Return the object of a chunk."""
        body = payload + _RECORD.pack(computed_s, len(payload), _RAW, _RECORD_FORMAT)
        packed = body + _digest(name, body, _RECORD_FORMAT)
        return packed if self._keys is None else self._keys.seal(packed, name.encode())

    def unpack(self, name: str, data: bytes | memoryview) -> tuple[np.ndarray, float] | None:
        """Return a chunk's bytes and their time of computation; None unless they were packed under ``name``."""
        packed = data if self._keys is None else self._keys.open(data, name.encode())
        if packed is None or len(packed) < self.chunk_bytes + _TIME.size + _DIGEST_BYTES:
            return None
        view = memoryview(packed)
        body, digest = view[:-_DIGEST_BYTES], view[-_DIGEST_BYTES:]
        payload = np.frombuffer(body[: self.chunk_bytes], np.uint8)
        if _digest(name, body, _RECORD_FORMAT) == digest:
            computed_s, *record = _RECORD.unpack(body[-_RECORD.size :])
            is_known = record == [self.chunk_bytes, _RAW, _RECORD_FORMAT] and len(body) == len(payload) + _RECORD.size
        else:
            is_known = len(body) == len(payload) + _TIME.size and _digest(name, body) == digest
            (computed_s,) = _TIME.unpack(body[-_TIME.size :])
        return (payload, computed_s) if is_known and math.isfinite(computed_s) else None


def _digest(name: str, body: bytes | memoryview, record_format: int | None = None) -> bytes:
    digest = xxhash.xxh3_128(body)
    digest.update(name.encode() if record_format is None else f"{record_format} {name}".encode())
    return digest.digest()
