"""The data for recognising a document: hashes and edge tokens of each form, and access groups.

The text and the tokens of a document are not kept.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import Self

from ragcache_core.types import DocId

EDGE_WIDTH = 6
"""Number of tokens kept of each edge."""
_FORM = struct.Struct("<QIIIBBBB")
_DIGEST_BYTES = 8


@dataclass(frozen=True, slots=True)
class DocumentForm:
    """One text of a document in prompts, as tokens.

    Attributes:
        content: 64-bit hash of the interior, the tokens that do not depend on the text around the document.
        length: tokens of the interior.
        anchor_key: 32-bit hash of the anchor, a window of the interior.
        anchor_at: position of the anchor in the interior.
        anchor_size: tokens of the anchor.
        head: tokens before the interior, from the interior outwards, ``EDGE_WIDTH`` of them at most.
        tail: tokens after the interior, from the interior outwards, ``EDGE_WIDTH`` of them at most.
        is_head_cut: there are more tokens before the interior than ``head`` has.
        is_tail_cut: there are more tokens after the interior than ``tail`` has.
    """

    content: int
    length: int
    anchor_key: int
    anchor_at: int
    anchor_size: int
    head: tuple[int, ...]
    tail: tuple[int, ...]
    is_head_cut: bool = False
    is_tail_cut: bool = False

    def to_bytes(self) -> bytes:
        """Return the form as bytes for :meth:`from_bytes`."""
        num_edge = len(self.head) | self.is_head_cut << 4, len(self.tail) | self.is_tail_cut << 4
        fixed = (self.content, self.length, self.anchor_key, self.anchor_at, self.anchor_size, *num_edge, 0)
        edges = self.head + self.tail
        return _FORM.pack(*fixed) + struct.pack(f"<{len(edges)}i", *edges)

    @classmethod
    def from_bytes(cls, data: bytes, at: int) -> tuple[Self, int]:
        """Return the form at an offset, and the offset after it.

        Raises:
            struct.error: the data ends before.
        """
        content, length, key, anchor_at, size, head, tail, _ = _FORM.unpack_from(data, at)
        num_head, num_tail = head & 15, tail & 15
        edges = struct.unpack_from(f"<{num_head + num_tail}i", data, at := at + _FORM.size)
        form = cls(
            *(content, length, key, anchor_at, size, edges[:num_head], edges[num_head:]),
            is_head_cut=bool(head >> 4),
            is_tail_cut=bool(tail >> 4),
        )
        return form, at + 4 * len(edges)


@dataclass(frozen=True, slots=True)
class Registration:
    """A document that is recognised in prompts.

    Attributes:
        doc_id: the document.
        forms: the texts by which prompts may show it.
        acl: the groups that may read it, sorted; ``None`` is everybody.
        digest: the beginning of a hash of its text, by which the same text is known again.
    """

    doc_id: DocId
    forms: tuple[DocumentForm, ...]
    acl: tuple[str, ...] | None = None
    digest: bytes = bytes(_DIGEST_BYTES)

    def __post_init__(self) -> None:
        if len(self.digest) != _DIGEST_BYTES:
            raise ValueError(f"digest has {len(self.digest)} bytes: it must have {_DIGEST_BYTES}")

    def is_same_text(self, other: Registration) -> bool:
        """Return whether both have the same text and access groups."""
        return self.digest == other.digest and self.acl == other.acl

    def to_bytes(self) -> bytes:
        """Return the registration as bytes for :meth:`from_bytes`."""
        head = json.dumps([self.doc_id, self.acl, len(self.forms)], ensure_ascii=False).encode()
        forms = b"".join(form.to_bytes() for form in self.forms)
        return struct.pack("<I", len(head)) + head + self.digest + forms

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Return the registration of :meth:`to_bytes`.

        Raises:
            ValueError: the data is damaged.
        """
        try:
            (size,) = struct.unpack_from("<I", data)
            doc_id, acl, num_forms = json.loads(data[4 : 4 + size])
            at = 4 + size + _DIGEST_BYTES
            forms = []
            for _ in range(num_forms):
                form, at = DocumentForm.from_bytes(data, at)
                forms.append(form)
        except (struct.error, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f"a registration is damaged: {error}") from error
        digest = data[4 + size : 4 + size + _DIGEST_BYTES]
        return cls(str(doc_id), tuple(forms), None if acl is None else tuple(acl), digest)
