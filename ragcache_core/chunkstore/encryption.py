"""Encrypted slots: each chunk is encrypted and authenticated with AES-256-GCM, and unreadable without the key.

A slot holds ciphertext, as long as what is stored of the chunk. Beside the file of slots lies one of headers, 32 bytes
for each slot::

    |key id 4|nonce 12|tag 16|

The cache's identity is authenticated as well: a slot of another cache cannot be decrypted. A changed slot, or one with
a changed header, decrypts to zeros, which do not match the chunk's checksum: a miss. Random nonces are good for
2**32 chunks of a key (NIST SP 800-38D, section 8.3).

In a store of many machines each object is encrypted with a key of its own, derived from the key and the object's name.
There the limit applies to each object, not to all together.
"""

from __future__ import annotations

import base64
import binascii
import errno
import hashlib
import hmac
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ragcache_core.chunkstore.slotfile import SlotFile, runs
from ragcache_core.errors import ConfigError
from ragcache_core.private_files import check_not_exposed, open_private

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEY_ENV = "RAGCACHE_DISK_KEY"
"""The environment variable that holds what a key file would."""
KEY_BYTES = 32
_ID_BYTES, _NONCE_BYTES, _TAG_BYTES = 4, 12, 16
_HEADER_BYTES = _ID_BYTES + _NONCE_BYTES + _TAG_BYTES
_HEADERS_AT_ONCE = 512  # half of what the system takes in one call
_HINT = "give a line of 32 random bytes in base64, as openssl rand -base64 32 writes it, the key in use first"


@dataclass(frozen=True, slots=False, repr=False)
class Keys:
    """The key that encrypts, first, and those that only decrypt older chunks."""

    secrets: tuple[bytes, ...]

    @classmethod
    def parse(cls, text: str, source: str) -> Keys:
        """Return the keys of a text with one on each line; empty lines and such that begin with ``#`` are passed over.

        Raises:
            ConfigError: there is none, or one is not 32 bytes in base64. The message holds no part of a key.
        """
        lines = [line.strip() for line in text.splitlines()]
        found = []
        for number, line in enumerate(lines, 1):
            if not line or line.startswith("#"):
                continue
            try:
                secret = base64.b64decode(line, validate=True)
            except (binascii.Error, ValueError):
                raise ConfigError(f"line {number} of {source} is no base64: {_HINT}") from None
            if len(secret) != KEY_BYTES:
                raise ConfigError(f"line {number} of {source} is a key of {len(secret)} bytes: {_HINT}")
            found.append(secret)
        if not found:
            raise ConfigError(f"{source} holds no key: {_HINT}")
        return cls(tuple(dict.fromkeys(found)))

    @cached_property
    def ciphers(self) -> Mapping[bytes, AESGCM]:
        """The ciphers that decrypt slots, by the id of the key; the first one encrypts."""
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        return {key_id(secret): AESGCM(secret) for secret in self.secrets}

    @cached_property
    def _by_id(self) -> Mapping[bytes, bytes]:
        return {key_id(secret): secret for secret in self.secrets}

    @property
    def encryption_key_id(self) -> str:
        """The name of the key that encrypts, which reveals nothing of it."""
        return key_id(self.secrets[0]).hex()

    def name_of(self, name: bytes) -> bytes:
        """Return 32 bytes that replace a name, and that cannot be derived from it without the key.

        They come from the last key: an engine with a new key before it hits objects of engines without the new key.
        """
        return hmac.digest(self.secrets[-1], b"ragcache object name" + name, "sha256")

    def encrypt(self, plain: bytes, owner: bytes) -> bytes:
        """Return encrypted bytes, authenticated with their ``owner``, after their header."""
        secret = self.secrets[0]
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return key_id(secret) + nonce + _object_cipher(secret, owner).encrypt(nonce, plain, owner)

    def decrypt(self, encrypted: bytes | memoryview, owner: bytes) -> bytes | None:
        """Undo :meth:`encrypt`; None if the bytes are changed, another's, or of a key that is not here."""
        from cryptography.exceptions import InvalidTag

        view = memoryview(encrypted)
        secret = self._by_id.get(bytes(view[:_ID_BYTES]))
        if secret is None or len(view) < _HEADER_BYTES:
            return None
        head = _ID_BYTES + _NONCE_BYTES
        try:
            return _object_cipher(secret, owner).decrypt(view[_ID_BYTES:head], view[head:], owner)
        except InvalidTag:
            return None


def key_id(secret: bytes) -> bytes:
    """Return the 4 bytes by which a slot names its key."""
    return hashlib.sha256(b"ragcache disk key" + secret).digest()[:_ID_BYTES]


def _object_cipher(secret: bytes, owner: bytes) -> AESGCM:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(hmac.digest(secret, b"ragcache object key" + owner, "sha256"))


def load_keys(path: Path | None) -> Keys | None:
    """Return the keys of a file, or without one of the environment; None where neither is given.

    Raises:
        ConfigError: it cannot be read, every user of this machine can read it, or it holds something else.
    """
    source = KEY_ENV if path is None else str(path)
    try:
        if path is not None:
            check_not_exposed(path)
        text = os.environ.get(KEY_ENV) if path is None else path.read_text(encoding="ascii")
    except OSError as error:
        raise ConfigError(f"disk_key_file {path} cannot be read ({error.strerror}): {_HINT}") from error
    except UnicodeDecodeError:
        raise ConfigError(f"disk_key_file {path} is no text: {_HINT}") from None
    if text is None:
        return None
    if find_spec("cryptography") is None:
        raise ConfigError(
            f"{source} asks for an encrypted disk, for which cryptography is not installed: pip install "
            "'ragcache[encryption]'"
        )
    return Keys.parse(text, source)


class EncryptedSlotFile:
    """A :class:`~ragcache_core.chunkstore.slotfile.SlotFile` with encrypted slots; the caller sees plain chunks."""

    def __init__(self, path: Path, chunk_bytes: int, keys: Keys, *, direct: bool | None = None) -> None:
        """Open or make the file, and that of the headers beside it.

        Raises:
            OSError
        """
        self._slots = SlotFile(path, chunk_bytes, direct=direct)
        try:
            self._headers = os.fdopen(open_private(path.with_suffix(".headers"), os.O_RDWR | os.O_CREAT), "r+b", 0)
        except BaseException:
            self._slots.close()
            raise
        self._ciphers = keys.ciphers
        self._encryption_key_id, self._cipher = next(iter(keys.ciphers.items()))
        self._owner = path.parent.name.encode()
        self._bounce: list[memoryview] = []  # kept: to map it again costs as much as all the rest
        self.chunk_bytes = chunk_bytes
        self.slot_bytes = self._slots.slot_bytes
        self.is_direct = self._slots.is_direct

    @property
    def num_slots(self) -> int:
        """Whole slots in the file."""
        return self._slots.num_slots

    def write(self, slots: Sequence[int], payloads: Sequence[memoryview]) -> None:
        """Encrypt payloads into slots. One thread at a time.

        Raises:
            OSError: any part of those slots may have been written.
        """
        if len(self._bounce) < len(payloads):
            _, self._bounce = self._slots.aligned_buffers(len(payloads))
        views = self._bounce[: len(payloads)]
        encrypted = memoryview(bytearray(self.chunk_bytes + _TAG_BYTES))
        headers = []
        for view, payload in zip(views, payloads, strict=True):
            nonce = secrets.token_bytes(_NONCE_BYTES)
            end = len(payload)
            self._cipher.encrypt_into(nonce, payload, self._owner, encrypted[: end + _TAG_BYTES])
            view[:end] = encrypted[:end]
            headers.append(memoryview(b"".join((self._encryption_key_id, nonce, encrypted[end : end + _TAG_BYTES]))))
        self._write_headers(slots, headers)
        self._slots.write(slots, [view[: len(payload)] for view, payload in zip(views, payloads, strict=True)])

    def read(self, slots: Sequence[int], targets: Sequence[memoryview]) -> None:
        """Fill targets with what is in the slots, those whose slot cannot be decrypted with zeros.

        Raises:
            OSError
        """
        self._slots.read(slots, targets)
        encrypted = memoryview(bytearray(self.chunk_bytes + _TAG_BYTES))
        for slot, target in zip(slots, targets, strict=True):
            header = os.pread(self._headers.fileno(), _HEADER_BYTES, slot * _HEADER_BYTES)
            end = len(target)
            encrypted[:end] = target
            if not self._decrypt(header, encrypted[: end + _TAG_BYTES], target):
                target[:] = bytes(len(target))

    def _write_headers(self, slots: Sequence[int], headers: Sequence[memoryview]) -> None:
        for first, run in runs(slots, headers):
            for start in range(0, len(run), _HEADERS_AT_ONCE):
                part = run[start : start + _HEADERS_AT_ONCE]
                num_written = os.pwritev(self._headers.fileno(), part, (first + start) * _HEADER_BYTES)
                if num_written != len(part) * _HEADER_BYTES:
                    raise OSError(errno.EIO, "not all headers were written")

    def _decrypt(self, header: bytes, encrypted: memoryview, target: memoryview) -> bool:
        from cryptography.exceptions import InvalidTag

        cipher = self._ciphers.get(header[:_ID_BYTES])
        if cipher is None or len(header) < _HEADER_BYTES:
            return False
        encrypted[-_TAG_BYTES:] = header[-_TAG_BYTES:]
        try:
            cipher.decrypt_into(header[_ID_BYTES:-_TAG_BYTES], encrypted, self._owner, target)
        except InvalidTag:
            return False
        return True

    def can_free(self) -> bool:
        """Return whether the file system takes space back. See :meth:`SlotFile.can_free`."""
        return self._slots.can_free()

    def free(self, slots: Iterable[int]) -> None:
        """Give the space of slots back.

        Raises:
            OSError: some may still take space.
        """
        self._slots.free(slots)

    @property
    def used_bytes(self) -> int:
        """What the slots take on the disk, without the headers."""
        return self._slots.used_bytes

    def aligned_buffers(self, num_chunks: int) -> tuple[memoryview, list[memoryview]]:
        """Return page-aligned memory for that many slots, and a view of ``chunk_bytes`` into each."""
        return self._slots.aligned_buffers(num_chunks)

    def erase(self, slots: Sequence[int], on_part: Callable[[], object] = lambda: None) -> None:
        """Leave nothing in slots, nor of what opens them. See :meth:`SlotFile.erase`.

        Raises:
            OSError: any of them may still hold what it held.
        """
        end = os.fstat(self._headers.fileno()).st_size
        inside = [slot for slot in slots if slot * _HEADER_BYTES < end]
        self._write_headers(inside, [memoryview(bytes(_HEADER_BYTES))] * len(inside))
        self._slots.erase(slots, on_part)

    def truncate(self, num_slots: int) -> None:
        """Cut the files after that many slots, unless they are shorter.

        Raises:
            OSError
        """
        self._slots.truncate(num_slots)
        if os.fstat(self._headers.fileno()).st_size > num_slots * _HEADER_BYTES:
            self._headers.truncate(num_slots * _HEADER_BYTES)

    def close(self) -> None:
        """Close the files. Nothing may be using them."""
        self._slots.close()
        self._headers.close()
