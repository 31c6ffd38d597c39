"""Recognition in one API server: its copy of the registrations, updated from the engine core's log."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence, Set
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

from ragcache_core.errors import ConfigError, quoted
from ragcache_core.log import logger_of
from ragcache_core.recognition import PolynomialHash, Recognition, Registration, Registry, find_documents
from ragcache_core.types import read_acl
from ragcache_core.vllm_plugin.server.recognition.journal import Change, RegistrationJournal
from ragcache_core.vllm_plugin.server.recognition.tokenizing import DocumentTokenizer, TokenizedForm
from ragcache_core.wire import MAX_DOC_ID_CHARS, check_text

logger = logger_of(__name__)

T = TypeVar("T")
Call = Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]
"""Calls the engine core's log with an action and its arguments."""
MAX_TEXT_CHARS = 1 << 20
"""Characters of a document. No prompt holds a longer one."""
_MAX_ACL_CHARS = 4096
"""Characters of a document's groups, which every API server keeps."""
_BATCH = 64
_PAGE = 250
"""Changes that are taken in at once: about 20 ms of the event loop."""
_MAX_USED = 10_000
_POLL_S = 0.5
_EVERYWHERE_S = 10.0
_REWRITE_S = 30.0
_ALL = "every tenant"
_UNSTORED = (
    "it is not on disk: the file of registrations cannot be written. Free space or correct its rights, and try again"
)
_SAME_CONTENT = (
    "64 other documents differ from it in their first and last words, or in the number of repetitions, alone: it is "
    "not told apart"
)
_TOO_MANY = "more documents came at once than the server recognises: raise max_documents, or register fewer"
_OF_A_RECORD = ("id", "text", "acl")


@dataclass(slots=True)
class RecognitionCounts:
    """Counts of recognition since the start.

    Attributes:
        num_prompts: prompts of plain clients, without spans of their own.
        num_recognised: documents in them.
        num_ambiguous: those of them whose text several ids have.
        num_unregistered: prompts without a registered document.
        num_private: prompts that share no KV, because they may show restricted text that is not recognised.
        num_unknown: prompts with text that is no registered document, as questions and altered documents are.
        num_tokens: tokens that were looked up.
        num_ns: the processor time of it, in ns.
    """

    num_prompts: int = 0
    num_recognised: int = 0
    num_ambiguous: int = 0
    num_unregistered: int = 0
    num_private: int = 0
    num_unknown: int = 0
    num_tokens: int = 0
    num_ns: int = 0


@dataclass(frozen=True, slots=True)
class RegistrationResult:
    """The result for one document: registered, or the reason. ``warning`` names a problem."""

    doc_id: str | None
    is_registered: bool
    error: str | None = None
    warning: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the result as the route sends it."""
        state = {"id": self.doc_id, "registered": self.is_registered, "error": self.error, "warning": self.warning}
        return {name: value for name, value in state.items() if value is not None}


@dataclass(frozen=True, slots=True)
class _Document:
    doc_id: str
    text: str
    acl: tuple[str, ...] | None
    digest: bytes


class RecognitionService:
    """The registered documents of all tenants in one API server.

    Args:
        call: calls the engine core's log.
        tokenizer: tokenises documents.
        reader: which of the API servers this is.
        num_readers: how many there are.
        journal: the file of registrations, which the first API server writes; ``None`` without a disk.
        limit: documents of requests without a tenant.
        restricted: tenants whose plain requests are private whether they have restricted documents or not.

    Attributes:
        counts: of this API server.
        total: of all API servers, as of the last call of the log.
        on_counted: is called when the counts have changed.
    """

    def __init__(
        self,
        call: Call,
        tokenizer: DocumentTokenizer,
        *,
        reader: int = 0,
        num_readers: int = 1,
        journal: RegistrationJournal | None = None,
        limit: int = 100_000,
        restricted: Collection[str | None] = (),
    ) -> None:
        self._call = call
        self._tokenizer = tokenizer
        self._reader, self._num_readers = reader, num_readers
        self._journal = journal if reader == 0 else None
        self._limit = limit
        self._always_restricted = frozenset(restricted)
        self._hashing: PolynomialHash | None = None
        self._registries: dict[str | None, Registry] = {}
        self._restricted: frozenset[str | None] = frozenset()
        self._is_all_restricted = False
        self._last = 0
        self._has_unconfirmed = False  # restricted documents that other servers, or the disk, may not have
        self._has_ended = False  # the journal still has removed registrations
        self._rewritten_s = time.monotonic()
        self._used: dict[tuple[str | None, str], None] = {}
        self._refused: set[tuple[str | None, str]] = set()  # in the log, but ambiguous with others
        self._lock = asyncio.Lock()
        self._registering = asyncio.Lock()
        self._changing: set[asyncio.Task[Any]] = set()
        self.counts = RecognitionCounts()
        self.total: dict[str, int] = {}
        self.on_counted: Callable[[], None] = lambda: None

    # The log

    async def begin(self) -> None:
        """Start with the registrations of the journal, or of the first API server.

        Raises:
            ConfigError: the first API server has not begun within 60 s.
        """
        if self._reader == 0:
            await self._begin_from_journal()
        else:
            await self._begin_after_the_first()
        await self.pull()

    async def _begin_from_journal(self) -> None:
        stored, restricted = None, set[str | None]()
        try:
            stored = None if self._journal is None else await asyncio.to_thread(self._journal.load)
            if stored is None and self._journal is not None:
                restricted = await asyncio.to_thread(self._journal.load_restricted)
        except ValueError as error:
            logger.warning(
                "RC-REGISTRATIONS-LOST: registered documents are lost, so plain requests of all tenants share no KV "
                "until every document is registered again and the files registrations-*.journal are deleted: %s",
                error,
            )
            restricted = {_ALL}
        points = PolynomialHash.random().points if stored is None else stored.points
        restricted |= set() if stored is None else stored.restricted
        body = {"points": list(points), "limit": self._limit, "restricted": sorted(restricted, key=str)}
        self._hashing = _hashing_of(await self._call("begin", body))
        entries = [] if stored is None else [(tenant, data) for (tenant, _), data in stored.entries.items()]
        for at in range(0, len(entries), _PAGE):
            await self._call("append", {"entries": entries[at : at + _PAGE]})
        is_whole = stored is not None and not stored.is_cut
        if self._journal is not None and (not is_whole or self._journal.has_surplus(len(entries))):
            await asyncio.to_thread(self._journal.rewrite, self._hashing.points, restricted, entries)
        if entries:  # all of them are in the journal
            await self._read(is_written=True)

    async def _begin_after_the_first(self) -> None:
        ends_s = time.monotonic() + 60.0
        while (state := await self._call("begin", {"points": None}))["points"] is None:
            if time.monotonic() > ends_s:
                raise ConfigError("the first API server does not start: look at its log, and start the server again")
            await asyncio.sleep(0.1)
        self._hashing = _hashing_of(state)

    async def follow(self) -> None:
        """Follow the registrations of other API servers, until the engine crashes."""
        while True:
            await asyncio.sleep(_POLL_S)
            await self.pull()

    async def pull(self) -> None:
        """Apply all changes of the log, and acknowledge them."""
        async with self._lock:
            await self._read(is_written=False)
        if self._journal is not None:
            is_due = (self._has_ended or self._journal.is_broken) and time.monotonic() > self._rewritten_s + _REWRITE_S
            if is_due or self._journal.has_surplus(self.total["num_documents"]):
                await self._rewrite_journal()

    async def _read(self, *, is_written: bool) -> None:
        while True:
            used, self._used = list(self._used), {}
            is_stored = self._journal is None or not self._journal.is_broken
            body = {"reader": self._reader, "after": self._last, "limit": _PAGE, "used": used, "is_stored": is_stored}
            state = await self._call("read", {**body, "counts": asdict(self.counts)})
            newly_restricted = frozenset(state["restricted"]) - self._restricted
            self._restricted = frozenset(state["restricted"])
            self._is_all_restricted = _ALL in self._restricted
            self.total = {**state["counts"], "num_documents": state["num_documents"]}
            if state["is_reset"]:
                self._registries.clear()
                self._refused.clear()
            changes: list[Change] = [(tenant, doc_id, data) for _, tenant, doc_id, data in state["changes"]]
            self._apply(changes)
            self._has_ended |= any(data is None for _, _, data in changes)
            if self._journal is not None and (changes or newly_restricted) and not is_written:
                await asyncio.to_thread(self._journal.append, changes, newly_restricted)
            elif len(changes) == _PAGE:
                await asyncio.sleep(0)  # requests go on between two pages
            if not changes:
                self._last = 0 if state["is_reset"] else self._last
                return
            self._last = state["changes"][-1][0]

    def _apply(self, changes: Sequence[Change]) -> None:
        for tenant, doc_id, data in changes:
            self._refused.discard((tenant, doc_id))
            if data is None:
                if (registry := self._registries.get(tenant)) is not None:
                    registry.forget(doc_id)
            else:
                registration = Registration.from_bytes(data)
                self._has_unconfirmed |= registration.acl is not None
                if not self._registry_of(tenant).add(registration):
                    self._refused.add((tenant, doc_id))

    def _registry_of(self, tenant: str | None) -> Registry:
        assert self._hashing is not None
        if tenant not in self._registries:
            self._registries[tenant] = Registry(self._hashing, self._tokenizer.token_bytes)
        return self._registries[tenant]

    @property
    def epoch(self) -> str:
        """A name of the registrations since they were empty; a restart without their file changes it."""
        assert self._hashing is not None
        return hashlib.sha256(repr(self._hashing.points).encode()).hexdigest()[:16]

    # Recognition

    def recognise(self, tenant: str | None, token_ids: Sequence[int]) -> Recognition:
        """Return the documents in a tenant's prompt: the tenant's and the operator's."""
        assert self._hashing is not None
        began_ns = time.thread_time_ns()
        names = dict.fromkeys((tenant, None))
        registries = [self._registries[name] for name in names if name in self._registries]
        found = find_documents(self._hashing, registries, token_ids)
        if len(self._used) < _MAX_USED:
            self._used.update(((name, each.doc_id), None) for each in found.documents for name in names)
        self.counts.num_ns += time.thread_time_ns() - began_ns
        self.counts.num_tokens += len(token_ids)
        return found

    def count(self, found: Recognition, *, is_private: bool) -> None:
        """Count a prompt of a plain client."""
        self.counts.num_prompts += 1
        self.counts.num_recognised += len(found.documents)
        self.counts.num_ambiguous += sum(each.is_ambiguous for each in found.documents)
        self.counts.num_unregistered += not found.documents
        self.counts.num_private += is_private
        self.counts.num_unknown += not found.is_known
        self.on_counted()

    def is_restricted(self, tenant: str | None) -> bool:
        """Return whether a tenant has documents with access groups."""
        those = self._restricted | self._always_restricted
        return self._is_all_restricted or tenant in those or None in those

    def is_registered(self, doc_id: str) -> bool:
        """Return whether any tenant has registered a document."""
        return any(doc_id in registry for registry in self._registries.values())

    def figures(self) -> dict[str, int]:
        """Return the statistics of all API servers."""
        if self._num_readers == 1:
            num_documents = sum(map(len, self._registries.values()))
            return {**asdict(self.counts), "num_documents": num_documents}
        zeros = {each.name: 0 for each in fields(RecognitionCounts)}
        return {**zeros, "num_documents": 0, **self.total}

    def unsearched(self) -> tuple[str, ...]:
        """Return the KV that a deletion by document cannot find, with a hint."""
        num_unknown = self.figures()["num_unknown"]
        if not num_unknown:
            return ()
        return (
            f"{num_unknown} prompts of plain clients held text that was no registered document: KV of altered copies, "
            "and of copies from before a registration that no later prompt has shown, is not known by document. "
            "'ragcache cache purge' deletes it",
        )

    # Registration

    async def register(self, tenant: str | None, records: Sequence[object]) -> list[RegistrationResult]:
        """Register documents of a tenant; an invalid one does not prevent others.

        Documents with access groups are known to every API server, and on disk, at the return.
        """
        results: list[RegistrationResult] = []
        for at in range(0, len(records), _BATCH):
            results += await self._whole(self._register_batch(tenant, records[at : at + _BATCH]))
        return results

    async def _whole(self, change: Coroutine[Any, Any, T]) -> T:
        """Return a change's result; changes run one at a time, and complete if the client leaves."""

        async def alone() -> T:
            async with self._registering:
                return await change

        task = asyncio.create_task(alone())
        self._changing.add(task)
        task.add_done_callback(self._changing.discard)
        return await asyncio.shield(task)

    async def _register_batch(self, tenant: str | None, records: Sequence[object]) -> list[RegistrationResult]:
        read = [_read_document(record) for record in records]
        registry = self._registry_of(tenant)
        wanted = {
            index: each
            for index, each in enumerate(read)
            if isinstance(each, _Document) and not registry.is_registered(each.doc_id, each.digest, each.acl)
        }
        forms = await asyncio.to_thread(self._tokenize, [each.text for each in wanted.values()])
        taken: set[int] = set()
        made: dict[int, bytes] = {}
        warnings: dict[int, str] = {}
        for (index, document), tokenized in zip(wanted.items(), forms, strict=True):
            if isinstance(tokenized, str):
                read[index] = RegistrationResult(document.doc_id, is_registered=False, error=tokenized)
                continue
            await asyncio.sleep(0)  # requests go on between two long texts
            kept = [form for each in tokenized if (form := registry.make_form(each.tokens, each.edges, taken))]
            taken |= {form.anchor_key for form in kept}
            if not kept:
                why = "the text has fewer than 6 tokens, or changes with the text around it: register longer texts"
                read[index] = RegistrationResult(document.doc_id, is_registered=False, error=why)
                continue
            made[index] = Registration(document.doc_id, tuple(kept), document.acl, document.digest).to_bytes()
            if tokenized and self._tokenizer.has_control_tokens(tokenized[0]):
                warnings[index] = (
                    "the text holds control tokens of the model, which may end the message that shows it: remove them "
                    "from the source, or show the text with a space in them"
                )
        late = ""
        restricted = [each for each in read if isinstance(each, _Document) and each.acl is not None]
        if made:
            if self._used:  # or documents in use would be dropped for new ones
                await self.pull()
            await self._call("append", {"entries": [(tenant, data) for data in made.values()]})
            await self.pull()
        if restricted and self._has_unconfirmed:  # other servers may lack what this one knows
            number = self._last
            late = await self._wait_for_all(number)
            self._has_unconfirmed = bool(late) or self._last > number
        results = []
        for index, each in enumerate(read):
            if isinstance(each, RegistrationResult):
                results.append(each)
            elif each.doc_id not in registry:
                has_same_content = (tenant, each.doc_id) in self._refused
                why = _SAME_CONTENT if has_same_content else _TOO_MANY
                results.append(RegistrationResult(each.doc_id, is_registered=False, error=why))
            elif late and each.acl is not None:
                results.append(RegistrationResult(each.doc_id, is_registered=False, error=late))
            else:
                results.append(RegistrationResult(each.doc_id, is_registered=True, warning=warnings.get(index)))
        has_failed = any(
            isinstance(record, dict) and record.get("acl") is not None and not result.is_registered
            for record, result in zip(records, results, strict=True)
        )
        if has_failed and tenant not in self._restricted:  # prompts may show it nevertheless
            await self._call("restrict", {"tenants": [tenant]})
            await self.pull()
        return results

    def _tokenize(self, texts: Sequence[str]) -> list[list[TokenizedForm] | str]:
        forms: list[list[TokenizedForm] | str] = []
        for text in texts:
            try:
                forms.append(self._tokenizer.forms_of(text))
            except Exception as error:  # a tokenizer's own, and it must not lose the other documents
                forms.append(f"the text cannot be registered: {error!s:.200}")
        return forms

    async def _wait_for_all(self, number: int) -> str:
        """Wait until every API server has applied a change; return "" or the reason of a failure."""
        await self.pull()  # the second one says that the first one's changes are on disk
        ends_s = time.monotonic() + _EVERYWHERE_S
        while (state := await self._call("read_by", {"num_readers": self._num_readers}))["number"] < number:
            if time.monotonic() > ends_s:
                return f"not all {self._num_readers} API servers know it after {_EVERYWHERE_S:g} s: register it again"
            await asyncio.sleep(0.05)
        return "" if state["is_stored"] else _UNSTORED

    async def forget(self, doc_ids: Set[str]) -> tuple[str, ...]:
        """Remove documents of all tenants from every API server and disk; return what failed."""
        late = await self._whole(self._forget(doc_ids))
        return (f"the registration of the documents: {late}",) if late else ()

    async def _forget(self, doc_ids: Set[str]) -> str:
        is_known = any(map(self.is_registered, doc_ids))
        state = await self._call("forget", {"ids": sorted(doc_ids)})
        await self.pull()
        if self._journal is not None and is_known:  # the ids must not stay on disk
            await self._rewrite_journal()
        return await self._wait_for_all(state["last"])

    async def _rewrite_journal(self) -> None:
        assert self._journal is not None
        assert self._hashing is not None
        entries: list[tuple[str | None, bytes]] = []
        restricted: list[str | None] = []
        async with self._lock:  # later registrations are appended afterwards
            after, is_end = 0, False
            while not is_end:
                state = await self._call("entries", {"after": after, "limit": _PAGE})
                entries += state["entries"]
                after, is_end, restricted = state["last"], state["is_end"], state["restricted"]
            await asyncio.to_thread(self._journal.rewrite, self._hashing.points, restricted, entries)
            self._has_ended, self._rewritten_s = False, time.monotonic()


def _hashing_of(state: dict[str, Any]) -> PolynomialHash:
    one, other = state["points"]
    return PolynomialHash((one, other))


def _read_document(record: object) -> _Document | RegistrationResult:
    """Return a record of a request as a document, or the reason why it is invalid."""
    doc_id = record.get("id") if isinstance(record, dict) else None
    shown = quoted(doc_id, 80) if isinstance(doc_id, str) else None
    try:
        if not isinstance(record, dict) or not set(record) <= set(_OF_A_RECORD):
            raise ConfigError(f"the record is {quoted(record, 80)}: send id, text and, if restricted, acl")
        if not isinstance(doc_id, str) or not 0 < len(doc_id) <= MAX_DOC_ID_CHARS:
            raise ConfigError(f"id is {quoted(doc_id, 80)}: send 1 to {MAX_DOC_ID_CHARS} characters")
        check_text(doc_id, "id")
        text = record.get("text")
        if not isinstance(text, str) or not text.strip():
            raise ConfigError(f"text is {quoted(text, 80)}: send the document's text")
        if len(text) > MAX_TEXT_CHARS:
            raise ConfigError(
                f"text has {len(text)} characters, the limit is {MAX_TEXT_CHARS}: split the document as prompts show it"
            )
        check_text(text, "text")
        acl = None if record.get("acl") is None else read_acl(record["acl"], doc_id)
        for group in acl or ():
            check_text(group, "acl")
        if (num_chars := sum(map(len, acl or ()))) > _MAX_ACL_CHARS:
            raise ConfigError(
                f"the groups of acl have {num_chars} characters, the limit is {_MAX_ACL_CHARS}: name a group that has "
                "them all"
            )
    except ConfigError as error:
        is_text = isinstance(doc_id, str) and doc_id.isprintable() and len(doc_id) <= MAX_DOC_ID_CHARS
        return RegistrationResult(doc_id if is_text else shown, is_registered=False, error=str(error))
    return _Document(doc_id, text, acl, hashlib.sha256(text.strip().encode()).digest()[:8])
