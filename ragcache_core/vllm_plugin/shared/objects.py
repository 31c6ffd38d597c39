"""The objects of a shared store: a block's bytes, its age, and a checksum.

::

    |payload: length|computed at: 8, a float|length: 8|codec: 1|format: 1|XXH3: 16|

The codec is 0 for raw bytes, 1 for a Blosc2 frame. The checksum covers what is stored. Objects
of a RAGCache before had no length, codec and format: they are read as well, and were always raw.

With keys an object is encrypted with AES-256-GCM, and so authenticated with its name; without the key the name reveals
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

from ragcache_core.chunkstore.compression import HINT, Compression, is_installed, unpack
from ragcache_core.chunkstore.encryption import Keys
from ragcache_core.log import logger_of

logger = logger_of(__name__)

_NAME_FORMAT = 2
_TIME = struct.Struct("<d")
_RECORD = struct.Struct("<dQBB")
_RECORD_FORMAT = 3
_RAW, _PACKED = 0, 1
_DIGEST_BYTES = 16


class MissingCodecError(Exception):
    """An object is compressed, and Blosc2 is not installed."""


class Objects:
    """Names, packs and unpacks the objects of one namespace; other namespaces and formats have other names.

    Args:
        identity: everything that a chunk's bytes depend on besides its key, the same on every machine.
        chunk_bytes: of a chunk.
        keys: encrypt the objects; None leaves them in plain text.
        compression: packs chunks; None leaves them as they are. What is packed is read with either; only 8-bit numbers
            are a miss unless it is ``int8``.
    """

    def __init__(
        self,
        identity: Mapping[str, str | int],
        chunk_bytes: int,
        keys: Keys | None,
        compression: Compression | None = None,
    ) -> None:
        said = {**identity, "chunk_bytes": chunk_bytes, "format": _NAME_FORMAT, "is_encrypted": keys is not None}
        self.prefix = f"ragcache/{hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:32]}"
        self.chunk_bytes = chunk_bytes
        self._keys = keys
        self._compression = compression
        self._is_unpackable_logged = False

    def name_of(self, chunk: bytes) -> str:
        """Return the name of a block's object."""
        name = chunk if self._keys is None else self._keys.name_of(chunk)
        return f"{self.prefix}/{name.hex()}"

    def pack(self, name: str, payload: bytes, computed_s: float) -> bytes:
        """Return the object of a block."""
        record: bytes | memoryview = payload
        if self._compression is not None:
            (record,) = self._compression.pack([memoryview(payload)])
        codec = _RAW if len(record) == self.chunk_bytes else _PACKED
        body = b"".join((record, _RECORD.pack(computed_s, len(record), codec, _RECORD_FORMAT)))
        packed = body + _digest(name, body, _RECORD_FORMAT)
        return packed if self._keys is None else self._keys.encrypt(packed, name.encode())

    def unpack(self, name: str, data: bytes | memoryview) -> tuple[np.ndarray, float] | None:
        """Return a block's bytes and time of computation; ``None`` unless packed under ``name``.

        Raises:
            MissingCodecError: it is compressed, and cannot be unpacked here. The first is logged.
        """
        packed = data if self._keys is None else self._keys.decrypt(data, name.encode())
        if packed is None or len(packed) < _RECORD.size + _DIGEST_BYTES:
            return None
        view = memoryview(packed)
        body, digest = view[:-_DIGEST_BYTES], view[-_DIGEST_BYTES:]
        if _digest(name, body, _RECORD_FORMAT) == digest:
            computed_s, length, codec, record_format = _RECORD.unpack(body[-_RECORD.size :])
            record = body[: -_RECORD.size]
            payload = self._payload(record, codec) if (length, record_format) == (len(record), _RECORD_FORMAT) else None
        else:
            is_known = len(body) == self.chunk_bytes + _TIME.size and _digest(name, body) == digest
            (computed_s,) = _TIME.unpack(body[-_TIME.size :])
            payload = np.frombuffer(body[: self.chunk_bytes], np.uint8) if is_known else None
        return (payload, computed_s) if payload is not None and math.isfinite(computed_s) else None

    def record_write(self, num_bytes: int, seconds: float) -> None:
        """Record the duration of storing objects."""
        if self._compression is not None:
            self._compression.record_write(num_bytes, seconds)

    def _payload(self, record: memoryview, codec: int) -> np.ndarray | None:
        """Return the bytes of a block; ``None`` if missing, or the codec is unknown."""
        if codec == _RAW:
            return np.frombuffer(record, np.uint8) if len(record) == self.chunk_bytes else None
        if codec != _PACKED:
            return None
        if not is_installed():
            if not self._is_unpackable_logged:
                self._is_unpackable_logged = True
                logger.warning(
                    "RC-SHARED-COMPRESSED: RAGCache's shared store has compressed blocks, which are misses here: %s",
                    HINT,
                )
            raise MissingCodecError
        payload = np.empty(self.chunk_bytes, np.uint8)
        is_approximate = self._compression is not None and self._compression.is_approximate
        return payload if unpack(record, payload.data, is_approximate=is_approximate) else None


def _digest(name: str, body: bytes | memoryview, record_format: int | None = None) -> bytes:
    digest = xxhash.xxh3_128(body)
    digest.update(name.encode() if record_format is None else f"{record_format} {name}".encode())
    return digest.digest()
