"""Registrations as the bytes of a journal: a line of JSON, then records with checksums.

::

    {"format": "ragcache-registrations-1", "points": [71233, 9034421], "checksum": 813405612}
    head R "acme" <registration>      registered
    head F ["acme", "faq-7"]          forgotten
    head T ["acme", null]             tenants that have, or had, documents with access groups

A head is the size of its record and two checksums, of the size and of the record. A journal holds the secret points of
the hashes. It must be readable by its owner alone. A record that was cut off at the end, as by a crash, is left out.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Collection
from dataclasses import dataclass, field

from ragcache_core.recognition.registration import Registration
from ragcache_core.types import DocId

_FORMAT = "ragcache-registrations-1"
_SIZE = struct.Struct("<I")
_HEAD = struct.Struct("<III")


@dataclass(slots=True)
class StoredRegistrations:
    """What a journal says: points, restricted tenants, registrations by tenant and id, in order.

    ``num_records`` counts the records of the journal, also those that others have replaced. A journal that ``is_cut``
    must be rewritten before records are appended.
    """

    points: tuple[int, int]
    restricted: set[str | None] = field(default_factory=set)
    entries: dict[tuple[str | None, DocId], bytes] = field(default_factory=dict)
    num_records: int = 0
    is_cut: bool = False


def journal_head(points: tuple[int, int]) -> bytes:
    """Return the first line of a journal."""
    return json.dumps({"format": _FORMAT, "points": points, "checksum": _checksum_of(points)}).encode() + b"\n"


def registered_record(tenant: str | None, registration: bytes) -> bytes:
    """Return the record of a registration."""
    name = json.dumps(tenant).encode()
    return _framed(b"R" + struct.pack("<I", len(name)) + name + registration)


def forgotten_record(tenant: str | None, doc_id: DocId) -> bytes:
    """Return the record of the end of a registration."""
    return _framed(b"F" + json.dumps([tenant, doc_id]).encode())


def restricted_record(tenants: Collection[str | None]) -> bytes:
    """Return the record of tenants that have, or had, documents with access groups."""
    return _framed(b"T" + json.dumps(sorted(tenants, key=str)).encode())


def read_journal(data: bytes) -> StoredRegistrations:
    """Return what a journal says.

    Raises:
        ValueError: it is damaged, or of another format.
    """
    head, end, body = data.partition(b"\n")
    try:
        header = json.loads(head)
        one, other = header["points"]
        if header["format"] != _FORMAT or not end:
            raise ValueError(f"the format is {header['format']!r:.40}, this version reads {_FORMAT!r}")
        stored = StoredRegistrations((int(one), int(other)))
        if header["checksum"] != _checksum_of(stored.points):
            raise ValueError("its points have another checksum")
        at = 0
        while at + _HEAD.size <= len(body):
            size, size_checksum, checksum = _HEAD.unpack_from(body, at)
            if zlib.crc32(_SIZE.pack(size)) != size_checksum:  # and not all that follows cut off
                raise ValueError(f"the head at byte {len(head) + 1 + at} has another checksum")
            record = body[at + _HEAD.size : at + _HEAD.size + size]
            if len(record) < size:
                break  # cut off
            if zlib.crc32(record) != checksum:
                raise ValueError(f"the record at byte {len(head) + 1 + at} has another checksum")
            _apply(record, stored)
            at += _HEAD.size + size
        stored.is_cut = at < len(body)
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise ValueError(f"the journal of registrations is damaged: {error}") from error
    return stored


def _apply(record: bytes, stored: StoredRegistrations) -> None:
    kind, content = record[:1], record[1:]
    stored.num_records += 1
    if kind == b"R":
        (size,) = struct.unpack_from("<I", content)
        tenant, data = json.loads(content[4 : 4 + size]), content[4 + size :]
        registration = Registration.from_bytes(data)
        key = (tenant, registration.doc_id)
        stored.entries.pop(key, None)
        stored.entries[key] = data
        if registration.acl is not None:
            stored.restricted.add(tenant)
    elif kind == b"F":
        tenant, doc_id = json.loads(content)
        stored.entries.pop((tenant, doc_id), None)
    elif kind == b"T":
        stored.restricted.update(json.loads(content))
    else:
        raise ValueError(f"a record is of kind {kind!r}")


def _framed(record: bytes) -> bytes:
    return _HEAD.pack(len(record), zlib.crc32(_SIZE.pack(len(record))), zlib.crc32(record)) + record


def _checksum_of(points: tuple[int, int]) -> int:
    return zlib.crc32(json.dumps(points).encode())
