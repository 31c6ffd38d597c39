"""The log tells every reader the same documents, within its limits, and survives a restart."""

from __future__ import annotations

import random

import pytest

from ragcache_core.recognition import DocumentForm, Registration, RegistrationLog
from ragcache_core.recognition.files import (
    forgotten_record,
    journal_head,
    read_journal,
    registered_record,
    restricted_record,
)


def registration(doc_id: str, text: int = 0, acl: tuple[str, ...] | None = None) -> bytes:
    form = DocumentForm(2**63 + text, 30, 7, 3, 8, (1, 2), (3,), is_tail_cut=True)
    return Registration(doc_id, (form,), acl, text.to_bytes(8, "little")).to_bytes()


class Reader:
    """One API server's copy of the log."""

    def __init__(self, log: RegistrationLog, name: int = 0, limit: int = 3) -> None:
        self._log, self._name, self._limit = log, name, limit
        self._last = 0
        self.known: dict[tuple[str | None, str], bytes] = {}

    def read(self) -> None:
        while True:
            is_reset, changes = self._log.changes(self._name, self._last, self._limit)
            if is_reset:
                self.known.clear()
                self._last = 0
            for change in changes:
                if change.registration is None:
                    self.known.pop((change.tenant, change.doc_id), None)
                else:
                    self.known[change.tenant, change.doc_id] = change.registration
                self._last = change.number
            if not changes:
                return


def held(log: RegistrationLog) -> dict[tuple[str | None, str], bytes]:
    return {(tenant, Registration.from_bytes(data).doc_id): data for tenant, data in log.entries()}


def test_every_reader_has_what_the_log_has_whenever_it_reads() -> None:
    rng = random.Random(3)
    log = RegistrationLog(limit=12, tenant_limit=5)
    readers = [Reader(log, name, limit=name + 1) for name in range(3)]
    for _ in range(500):
        tenant = rng.choice([None, "acme", "other"])
        match rng.randint(0, 5):
            case 0:
                log.forget([f"d{rng.randint(0, 20)}"])
            case 1:
                log.note_use(tenant, [f"d{rng.randint(0, 20)}"])
            case _:
                log.append(tenant, [registration(f"d{rng.randint(0, 20)}", rng.randint(0, 2))])
        reader = rng.choice(readers)
        reader.read()
        assert reader.known == held(log)
        assert log.counts().get("acme", 0) <= 5
        assert log.counts().get(None, 0) <= 12


def test_the_documents_unseen_for_longest_are_dropped_and_only_a_tenants_own() -> None:
    log = RegistrationLog(limit=10, tenant_limit=3)
    log.append("other", [registration("kept")])
    log.append("acme", [registration(f"d{i}") for i in range(3)])
    log.note_use("acme", ["d0"])
    log.append("acme", [registration("d3")])
    assert {doc_id for _, doc_id in held(log)} == {"kept", "d0", "d2", "d3"}


def test_the_same_text_registered_again_is_no_change() -> None:
    log = RegistrationLog()
    number = log.append(None, [registration("one", 1)])
    assert log.append(None, [registration("one", 1)]) == number
    assert log.append(None, [registration("one", 2)]) > number
    assert log.append(None, [registration("one", 2, ("hr",))]) > number + 1


def test_a_tenant_stays_restricted_when_its_documents_are_dropped() -> None:
    log = RegistrationLog(tenant_limit=1)
    log.append("acme", [registration("secret", 1, ("hr",)), registration("public", 2)])
    log.forget(["public"])
    assert log.restricted == {"acme"}


def test_a_new_reader_reads_no_more_than_there_is_however_much_was_replaced() -> None:
    log = RegistrationLog()
    for text in range(300):
        log.append(None, [registration("one", text), registration(f"d{text % 3}", text)])
    reader = Reader(log)
    reader.read()
    assert reader.known == held(log)
    assert len(log.changes(0, 0, 1000)[1]) == len(log) == 4
    assert log.changes(0, log.last, 1000) == (False, [])


def test_what_every_reader_has_read_is_the_least_of_them() -> None:
    log = RegistrationLog()
    last = log.append(None, [registration("one")])
    one, other = Reader(log, 0), Reader(log, 1)
    one.read()
    assert log.min_read(2) == 0
    other.read()
    assert log.min_read(2) == last


def test_a_reader_that_was_away_for_too_long_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ragcache_core.recognition.log._MAX_FORGOTTEN", 4)
    log = RegistrationLog()
    log.append(None, [registration(f"d{i}") for i in range(20)])
    reader = Reader(log)
    reader.read()
    log.forget([f"d{i}" for i in range(15)])
    reader.read()
    assert reader.known == held(log)


def test_a_journal_holds_what_was_registered_and_not_forgotten() -> None:
    one, other, secret = registration("one", 1), registration("ünï", 2), registration("secret", 3, ("hr", "legal"))
    data = b"".join(
        [
            journal_head((70_000, 80_000)),
            restricted_record({"other"}),
            registered_record(None, one),
            registered_record("acme", secret),
            registered_record(None, other),
            forgotten_record("acme", "secret"),
            forgotten_record(None, "one"),
            registered_record(None, one),
        ]
    )
    stored = read_journal(data)
    assert stored.points == (70_000, 80_000)
    assert stored.restricted == {"acme", "other"}, "what was restricted once stays so"
    assert list(stored.entries.items()) == [((None, "ünï"), other), ((None, "one"), one)]
    assert stored.num_records == 7
    assert not stored.is_cut
    assert read_journal(data[:-3]).num_records == 6, "a record that was cut off is left out"
    assert read_journal(data[:-3]).is_cut


def test_a_damaged_journal_is_an_error() -> None:
    data = journal_head((70_000, 80_000)) + registered_record(None, registration("one", 1))
    flipped = bytearray(data)
    flipped[-20] ^= 1
    for bad in (b"", data[:20], data.replace(b"-1", b"-9", 1), bytes(flipped), b"[]\n", b"\xff\n"):
        with pytest.raises(ValueError, match="journal of registrations is damaged"):
            read_journal(bad)


def test_a_damaged_registration_is_an_error_and_not_another_document() -> None:
    data = registration("one")
    for size in range(0, len(data), 7):
        with pytest.raises(ValueError, match="damaged|unpack"):
            Registration.from_bytes(data[:size])


def test_a_changed_bit_anywhere_in_a_journal_is_detected() -> None:
    data = b"".join(
        [
            journal_head((70_000, 80_000)),
            registered_record(None, registration("one", 1, ("hr",))),
            registered_record("acme", registration("two", 2)),
        ]
    )
    assert not read_journal(data).is_cut
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError, match="damaged"):
            read_journal(bytes(changed))
