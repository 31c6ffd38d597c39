"""The log of all registrations: orders and limits them, and gives readers the changes.

::

    append(tenant, registrations)            ->  42              the number of the last change
    changes(reader=1, after=40)              ->  41 acme/faq-7 <registration>, 42 acme/faq-3 None (forgotten)
    min_read(num_readers=2)                  ->  42              every reader has all of it
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from ragcache_core.recognition.registration import Registration
from ragcache_core.types import DocId

MAX_DOCUMENTS = 100_000
"""Documents of requests without a tenant."""
MAX_TENANT_DOCUMENTS = 20_000
"""Documents of each tenant."""
_MAX_FORGOTTEN = 1 << 16
Key = tuple[str | None, DocId]


@dataclass(frozen=True, slots=True)
class LogChange:
    """A registration, or ``None`` for a removed one."""

    number: int
    tenant: str | None
    doc_id: DocId
    registration: bytes | None


class RegistrationLog:
    """Registrations by tenant and id, and their changes in order.

    Of more documents than the limit of a tenant, those are dropped that prompts have not shown for longest. A tenant
    that ever had a document with access groups stays restricted, because dropped documents may still be in prompts.

    Args:
        limit: documents of requests without a tenant.
        tenant_limit: documents of each tenant.
    """

    def __init__(self, limit: int = MAX_DOCUMENTS, tenant_limit: int = MAX_TENANT_DOCUMENTS) -> None:
        self._limit, self._tenant_limit = limit, min(limit, tenant_limit)
        self._entries: OrderedDict[Key, tuple[int, bytes]] = OrderedDict()
        self._keys: dict[int, Key] = {}  # by the number of the last change
        self._forgotten: deque[int] = deque()
        self._oldest_known = 0
        self._by_use: dict[str | None, OrderedDict[DocId, None]] = {}
        self._read: dict[int, int] = {}
        self._begun: dict[int, int] = {}  # a reader has nothing that ended before
        self._restricted: set[str | None] = set()
        self.last = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def restricted(self) -> frozenset[str | None]:
        """The tenants that have, or had, documents with access groups."""
        return frozenset(self._restricted)

    def restrict(self, tenants: Iterable[str | None]) -> None:
        """Mark tenants as having documents with access groups."""
        self._restricted.update(tenants)

    def append(self, tenant: str | None, registrations: Iterable[bytes]) -> int:
        """Add registrations, replacing those with the same ids; return the number of the last change.

        The same text with the same access groups is no change.

        Raises:
            ValueError: a registration is damaged; those before it are added.
        """
        for data in registrations:
            registration = Registration.from_bytes(data)
            key = (tenant, registration.doc_id)
            used = self._by_use.setdefault(tenant, OrderedDict())
            used[registration.doc_id] = None
            used.move_to_end(registration.doc_id)
            if registration.acl is not None:
                self._restricted.add(tenant)
            known = self._entries.get(key)
            if known is not None and Registration.from_bytes(known[1]).is_same_text(registration):
                continue
            if known is not None:
                del self._keys[known[0]]
            self.last += 1
            self._keys[self.last] = key
            self._entries[key] = self.last, data
            self._entries.move_to_end(key)
            if len(used) > (self._limit if tenant is None else self._tenant_limit):
                self._end((tenant, next(iter(used))))
        return self.last

    def forget(self, doc_ids: Collection[DocId]) -> int:
        """Remove documents of all tenants; return the number of the last change."""
        for tenant in list(self._by_use):
            for doc_id in doc_ids:
                if (tenant, doc_id) in self._entries:
                    self._end((tenant, doc_id))
        return self.last

    def note_use(self, tenant: str | None, doc_ids: Iterable[DocId]) -> None:
        """Record that prompts have shown documents."""
        used = self._by_use.get(tenant)
        if used is not None:
            for doc_id in doc_ids:
                if doc_id in used:
                    used.move_to_end(doc_id)

    def changes(self, reader: int, after: int, limit: int) -> tuple[bool, list[LogChange]]:
        """Return the next ``limit`` changes after a number, and whether the reader must start over.

        With the call the reader says that it has read all changes up to ``after``.
        """
        self._read[reader] = after
        is_reset = after > self.last or 0 < max(after, self._begun.get(reader, 0)) < self._oldest_known
        if is_reset or not after:
            after = self._read[reader] = 0
            self._begun[reader] = self.last
        first = after + 1 if after else next(iter(self._entries.values()), (self.last + 1, b""))[0]
        found: list[LogChange] = []
        is_sparse = self.last - first > len(self._keys)  # most changes are replaced by later ones
        for number in (n for n in self._keys if n >= first) if is_sparse else range(first, self.last + 1):
            key = self._keys.get(number)
            if key is None:
                continue
            entry = self._entries.get(key)
            is_live = entry is not None and entry[0] == number
            if is_live or after:  # a reader that has nothing has nothing to forget
                found.append(LogChange(number, *key, entry[1] if entry is not None and is_live else None))
                if len(found) == limit:
                    break
        return is_reset, found

    def min_read(self, num_readers: int) -> int:
        """Return the number up to which all readers have read."""
        return min(self._read.get(reader, 0) for reader in range(num_readers))

    def entries(self) -> Iterator[tuple[str | None, bytes]]:
        """Yield all registrations, the least recently used first within a tenant."""
        for tenant, used in self._by_use.items():
            for doc_id in used:
                yield tenant, self._entries[tenant, doc_id][1]

    def counts(self) -> Mapping[str | None, int]:
        """Return the number of documents of each tenant."""
        return {tenant: len(used) for tenant, used in self._by_use.items() if used}

    def _end(self, key: Key) -> None:
        tenant, doc_id = key
        del self._keys[self._entries.pop(key)[0]]
        del self._by_use[tenant][doc_id]
        self.last += 1
        self._keys[self.last] = key
        self._forgotten.append(self.last)
        while len(self._forgotten) > _MAX_FORGOTTEN:
            self._oldest_known = self._forgotten.popleft()
            del self._keys[self._oldest_known]
