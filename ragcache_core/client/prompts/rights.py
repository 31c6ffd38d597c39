"""With whom a prompt shares KV: whoever may read documents with the same groups.

The KV of a document depends on all that stands before it, so rights are those of a whole prompt. Its salt is made of
the groups of each of its documents, as sets of a set: that of one for ``hr`` and one for ``legal`` is not that of one
which both may read, for who is of ``hr`` alone may show the latter. A prompt of documents for everybody has none.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable

from ragcache_core.types import DocId, Document

_MAX_REMEMBERED = 1 << 16
"""Documents, many times more than can be recognised in prompts at a time."""
_SALT = re.compile(r"acl-[0-9a-f]{64}")


def salt_of(acls: Iterable[tuple[str, ...]]) -> str | None:
    """Return the salt of a prompt whose documents have these groups; None where everybody may read them."""
    groups = sorted(set(acls))
    return f"acl-{hashlib.sha256(json.dumps(groups).encode()).hexdigest()}" if groups else None


def joined_salt(salts: Iterable[str]) -> str | None:
    """Return the salt of a request of which several are said: the last, joined with that of its documents' rights."""
    own = rights = None
    for salt in salts:
        own, rights = (own, salt) if isinstance(salt, str) and _SALT.fullmatch(salt) else (salt, rights)
    if own is None or rights is None:
        return own if rights is None else rights
    return f"acl-{hashlib.sha256(json.dumps([own, rights]).encode()).hexdigest()}"


class RememberedRights:
    """Who may read the documents that this process has seen; thread-safe.

    Prompts of frameworks are text, in which documents are recognised and known by their ids. Ids of several stores may
    be the same, so all groups count that were ever seen with one.
    """

    def __init__(self) -> None:
        self._acls: OrderedDict[DocId, frozenset[tuple[str, ...]]] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, documents: Iterable[Document]) -> None:
        """Take note of documents that not everybody may read."""
        for document in documents:
            if document.acl is not None:
                with self._lock:
                    known = self._acls.pop(document.doc_id, frozenset())
                    self._acls[document.doc_id] = known | {tuple(document.acl)}
                    if len(self._acls) > _MAX_REMEMBERED:
                        self._acls.popitem(last=False)

    def __bool__(self) -> bool:
        """Whether any document is not for everybody."""
        return bool(self._acls)

    def of(self, doc_ids: Iterable[DocId | None]) -> frozenset[tuple[str, ...]]:
        """Return the groups of those of the documents that not everybody may read."""
        if not self._acls:
            return frozenset()
        with self._lock:
            return frozenset(acl for doc_id in doc_ids for acl in self._acls.get(doc_id or "", ()))


RIGHTS = RememberedRights()
"""Of all documents that this process has retrieved, or asked about."""
