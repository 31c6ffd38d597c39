"""The library of chunks: pages, pins, variants and transfers, under any order of events."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ragcache_core.chunk.types import ChunkKey, ChunkStatistics, ChunkVariant, ContextKey, chunk_key
from ragcache_core.policy import POLICIES, PrefillCostModel, make_policy
from ragcache_core.tree import KnowledgeTree
from ragcache_core.vllm_plugin.chunks.manager.entries import Reservation, StoredChunk
from ragcache_core.vllm_plugin.chunks.manager.eviction import ChunkEviction
from ragcache_core.vllm_plugin.chunks.manager.manager import ChunkManager
from ragcache_core.vllm_plugin.chunks.page_layout import num_pages_of, pack_token_ids
from tests.support.chunk_disk import Call, Drop, FakeDisk, Names, Read, Scrub, Write

T = 4
NUM_PAGES, NUM_DISK_PAGES = 12, 16


def library(policy: str = "pgdsf", *, num_disk_pages: int = 0, found: Sequence[StoredChunk] = ()) -> ChunkManager:
    cost = PrefillCostModel.default()
    ranks = ChunkEviction(KnowledgeTree(make_policy(policy, cost)), cost)
    books = ChunkManager(ranks, tokens_per_page=T, num_pages=NUM_PAGES, max_variants=2)
    if num_disk_pages:
        books.open_disk(FakeDisk(num_disk_pages, found))  # type: ignore[arg-type]  # a fake
    return books


def disk_of(books: ChunkManager) -> FakeDisk:
    disk = books._stock.disk
    assert isinstance(disk, FakeDisk)
    return disk


def tokens(chunk: int, num_tokens: int = 2 * T) -> list[int]:
    return [chunk * 100 + i for i in range(num_tokens)]


def statistics(context: ContextKey, num_tokens: int, inherited: float = 0.0) -> ChunkStatistics:
    return ChunkStatistics((), (), (), 0.5, (0.125,) * num_tokens, inherited, context=context)


def reserve(
    books: ChunkManager, ids: Sequence[int], *, behind: int = 0, request: str = "r", inherited: float = 0.0
) -> Reservation | None:
    return books.reserve(chunk_key(ids), ids, chunk_key([behind]), request, inherits=inherited)


def capture(
    books: ChunkManager, ids: Sequence[int], *, behind: int = 0, request: str = "r", inherited: float = 0.0
) -> ChunkVariant:
    reservation = reserve(books, ids, behind=behind, request=request, inherited=inherited)
    assert reservation is not None
    variant = books.commit(reservation, statistics(reservation.context, len(ids), inherited))
    assert variant is not None
    return variant


def found(books: ChunkManager, ids: Sequence[int]) -> tuple[ChunkVariant, ...]:
    return books.find({chunk_key(ids): ids}).get(chunk_key(ids), ())


def do_all(books: ChunkManager) -> list[Call]:
    """Have the disk do all that it was asked to since the last call, and return it."""
    books.poll()
    calls = disk_of(books).take_calls()
    for call in calls:
        if isinstance(call, Write | Read | Scrub):
            call.transfer.end(None)
    books.poll()
    return calls


def read_of(books: ChunkManager) -> Read:
    """Return the only read that the disk was asked for since the last call."""
    (read,) = [call for call in disk_of(books).take_calls() if isinstance(call, Read)]
    return read


def end(books: ChunkManager, call: Write | Read | Scrub, *, is_done: bool = True) -> None:
    call.transfer.end(None, is_found=is_done)
    books.poll()


def test_a_chunk_that_was_captured_is_found_with_its_statistics() -> None:
    books = library()
    variant = capture(books, tokens(1), behind=7)
    assert found(books, tokens(1)) == (variant,)
    assert variant.statistics.context == chunk_key([7])
    assert books.is_on_host(variant)
    assert len(books.pages(variant)) == 2


def test_a_chunk_with_other_tokens_under_its_key_is_not_found_and_counted() -> None:
    books = library()
    capture(books, tokens(1))
    assert books.find({chunk_key(tokens(1)): tokens(2)}) == {}
    assert books.reserve(chunk_key(tokens(1)), tokens(2), b"", "r", inherits=0.0) is None
    assert books.counters.num_mismatched_chunks == 2


def test_the_same_context_is_captured_once_and_another_is_another_variant() -> None:
    books = library()
    first = capture(books, tokens(1), behind=7)
    assert reserve(books, tokens(1), behind=7) is None
    second = capture(books, tokens(1), behind=8)
    assert found(books, tokens(1)) == (first, second)


def test_a_variant_that_is_as_a_prefill_makes_it_takes_the_place_of_one_that_inherited_an_error() -> None:
    books = library()
    off = capture(books, tokens(1), behind=7, inherited=0.1)
    assert reserve(books, tokens(1), behind=7, inherited=0.1) is None
    right = capture(books, tokens(1), behind=7)
    assert found(books, tokens(1)) == (right,)
    assert books.is_lost(off)
    assert reserve(books, tokens(1), behind=7) is None
    assert books.num_used_pages == 2


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "lru"])
def test_a_chunk_that_a_forecast_has_warmed_outlives_others(policy: str) -> None:
    books = library(policy)
    for chunk in range(6):
        capture(books, tokens(chunk))
        books.release("r")
        books.seed(chunk_key(tokens(chunk)), chunk_key([0]), 2 * T, 9 if chunk == 1 else 0)
    for chunk in range(6, 9):
        capture(books, tokens(chunk))
        books.release("r")
    assert chunk_key(tokens(1)) in books.stored()
    assert chunk_key(tokens(0)) not in books.stored()


def test_a_pinned_chunk_is_never_evicted() -> None:
    books = library()
    pinned = capture(books, tokens(1))
    assert books.pin([pinned], "asks")
    for chunk in range(2, 9):
        capture(books, tokens(chunk))
    assert books.is_on_host(pinned)
    books.release("asks")
    for chunk in range(9, 15):
        capture(books, tokens(chunk))
    assert books.is_lost(pinned)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_of_the_tiers_reports_which_chunk_goes(policy: str) -> None:
    books = library(policy)
    first = [capture(books, tokens(chunk)) for chunk in range(6)]
    for _ in range(3):
        for variant in first[1:]:
            books.record_use(variant, overhead=0.2)
    newest = capture(books, tokens(9))
    assert books.is_lost(first[0])
    assert all(books.is_on_host(variant) for variant in (*first[1:], newest))


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "lru"])
def test_an_unused_version_of_a_popular_chunk_leaves_before_used_ones_of_others(policy: str) -> None:
    books = library(policy)
    popular, unused = capture(books, tokens(1), behind=7), capture(books, tokens(1), behind=8)
    others = [capture(books, tokens(chunk)) for chunk in range(2, 6)]
    for variant in (*others, *[popular] * 8, *others):
        books.record_use(variant, overhead=0.0)
    capture(books, tokens(9))
    assert books.is_lost(unused)
    assert all(books.is_on_host(variant) for variant in (popular, *others))


def test_deleted_versions_are_not_evicted_and_new_ones_of_their_contexts_are() -> None:
    books = library("lru")
    in_use = capture(books, tokens(1))
    for chunk in (1, 2):
        capture(books, tokens(chunk), behind=8)
        books.name(chunk_key(tokens(chunk)), "document")
    assert books.pin([in_use], "asks")
    books.forget({"document"})
    again = capture(books, tokens(1))
    books.release("asks")
    assert found(books, tokens(1)) == (again,)
    assert books.num_used_pages == 2
    for chunk in range(2, 9):
        capture(books, tokens(chunk))
    assert books.is_lost(again)


def test_a_chunk_is_written_to_disk_and_read_back_when_it_is_wanted() -> None:
    books = library(num_disk_pages=NUM_DISK_PAGES)
    variant = capture(books, tokens(1))
    [write] = do_all(books)
    assert isinstance(write, Write)
    assert (write.chunk.variant, write.chunk.token_ids) == (variant, pack_token_ids(tokens(1)))
    for chunk in range(2, 8):
        capture(books, tokens(chunk))
        do_all(books)
    assert not books.is_on_host(variant)
    assert found(books, tokens(1)) == (variant,)
    assert books.pin([variant], "asks")
    assert not books.is_on_host(variant)
    read = read_of(books)
    end(books, read)
    assert books.is_on_host(variant)
    assert books.pages(variant) == read.pages


def test_a_chunk_that_cannot_be_read_is_lost_and_counted() -> None:
    books = library(num_disk_pages=NUM_DISK_PAGES)
    variant = capture(books, tokens(1))
    do_all(books)
    for chunk in range(2, 8):
        capture(books, tokens(chunk))
        do_all(books)
    assert books.pin([variant], "asks")
    end(books, read_of(books), is_done=False)
    assert books.is_lost(variant)
    assert found(books, tokens(1)) == ()
    assert (books.counters.num_lost_chunks, books.counters.num_corrupt_chunks) == (1, 1)
    assert disk_of(books).take_calls() == [Drop(variant)]
    books.release("asks")
    assert reserve(books, tokens(1)) is not None


def on_disk_alone(books: ChunkManager) -> ChunkVariant:
    """Return a chunk that has left memory for others, which are on disk too."""
    variant = capture(books, tokens(1))
    do_all(books)
    for chunk in range(2, 8):
        capture(books, tokens(chunk))
        do_all(books)
    assert not books.is_on_host(variant)
    return variant


def test_pages_are_exclusive_to_a_disk_read_until_it_ends() -> None:
    books = library(num_disk_pages=NUM_DISK_PAGES)
    wanted = on_disk_alone(books)
    assert books.pin([wanted], "asks")
    read = read_of(books)
    books.release("asks")
    taken = [r.pages for chunk in range(20, 26) if (r := reserve(books, tokens(chunk), request=str(chunk))) is not None]
    assert len(taken) == 5
    assert not set(read.pages) & {page for pages in taken for page in pages}
    end(books, read)
    assert reserve(books, tokens(26)) is not None


def test_pages_of_a_capture_that_was_called_off_are_not_read_into_before_the_workers_know() -> None:
    books = library(num_disk_pages=NUM_DISK_PAGES)
    assert books.begin_step() == 0
    called_off = reserve(books, tokens(1), request="ends")
    assert called_off is not None
    books.release("ends")
    told = books.begin_step()
    assert told
    assert books.begin_step() == 0, "once"
    others = [r for chunk in range(20, 26) if (r := reserve(books, tokens(chunk), request=str(chunk))) is not None]
    assert len(others) == 5
    assert not set(called_off.pages) & {page for each in others for page in each.pages}
    books.end_step(told)
    last = reserve(books, tokens(26))
    assert last is not None
    assert set(last.pages) == set(called_off.pages)


def test_what_could_not_be_written_is_not_on_disk() -> None:
    books = library(num_disk_pages=NUM_DISK_PAGES)
    variant = capture(books, tokens(1))
    [write] = disk_of(books).take_calls()
    assert isinstance(write, Write)
    for chunk in range(2, 9):
        capture(books, tokens(chunk))
    assert books.is_on_host(variant), "it is being written"
    end(books, write, is_done=False)
    assert books.is_on_host(variant)
    assert Drop(variant) in disk_of(books).take_calls()
    for chunk in range(9, 16):
        capture(books, tokens(chunk))
    assert books.is_lost(variant)


def test_a_disk_that_is_down_is_not_used_any_more_and_what_is_in_memory_stays() -> None:
    books = library(num_disk_pages=NUM_DISK_PAGES)
    kept = capture(books, tokens(1))
    do_all(books)
    gone = capture(books, tokens(2))
    do_all(books)
    assert books.pin([kept], "asks")
    for chunk in range(3, 9):
        capture(books, tokens(chunk))
        do_all(books)
    assert not books.is_on_host(gone)
    disk_of(books).is_down = True
    books.poll()
    assert books.is_on_host(kept)
    assert books.is_lost(gone)
    disk_of(books).take_calls()
    capture(books, tokens(20))
    assert not any(isinstance(c, Write | Read) for c in do_all(books))


def test_what_a_disk_does_not_answer_for_in_time_is_lost_and_its_pages_are_free() -> None:
    books = library(num_disk_pages=NUM_DISK_PAGES)
    wanted = on_disk_alone(books)
    assert books.pin([wanted], "asks")
    read = read_of(books)
    disk_of(books).is_down = True
    books.poll()
    assert books.is_lost(wanted)
    assert not read.transfer.move(lambda: pytest.fail("its pages hold something else"))
    assert (books.counters.num_lost_chunks, books.counters.num_corrupt_chunks) == (1, 0)
    assert reserve(books, tokens(30, NUM_PAGES * T)) is not None


def test_a_full_disk_evicts_the_chunk_with_the_lowest_priority() -> None:
    books = library(num_disk_pages=4)
    first = capture(books, tokens(1))
    do_all(books)
    second = capture(books, tokens(2))
    do_all(books)
    books.record_use(first, 0.1)
    capture(books, tokens(3))
    assert [call for call in do_all(books) if isinstance(call, Drop)] == [Drop(second)]
    assert books.is_on_host(second)
    assert books.num_used_disk_pages == 4


def test_chunks_are_found_again_after_a_restart_and_their_numbers_go_on() -> None:
    before = library(num_disk_pages=NUM_DISK_PAGES)
    variant = capture(before, tokens(1), behind=7)
    entry = StoredChunk(variant, pack_token_ids(tokens(1)), frequency=3.0, worth=9.0)
    after = library(found=[entry], num_disk_pages=NUM_DISK_PAGES)
    assert found(after, tokens(1)) == (variant,)
    assert not after.is_on_host(variant)
    assert capture(after, tokens(2)).number > variant.number


def test_what_a_start_finds_twice_or_beyond_its_room_is_deleted_and_its_number_not_given_again() -> None:
    before = library(num_disk_pages=NUM_DISK_PAGES)
    first = capture(before, tokens(1), behind=7)
    same, last = ChunkVariant(first.key, 8, 2 * T, first.statistics), capture(before, tokens(2))
    found = [StoredChunk(v, pack_token_ids(tokens(i)), worth, 1.0) for i, v, worth in ((1, first, 3.0), (1, same, 2.0))]
    found += [StoredChunk(last, pack_token_ids(tokens(2)), 1.0, 1.0)]
    books = library(found=found, num_disk_pages=3)
    assert list(books.stored()) == [first.key]
    assert disk_of(books).take_calls() == [Drop(same), Drop(last)]
    assert capture(books, tokens(3)).number > 8


def test_after_a_reset_nothing_is_found_and_nothing_is_written() -> None:
    books = library(num_disk_pages=NUM_DISK_PAGES)
    idle, held = capture(books, tokens(1)), capture(books, tokens(2))
    do_all(books)
    assert books.pin([held], "asks")
    books.clear()
    assert books.is_lost(idle)
    assert books.is_lost(held)
    assert found(books, tokens(2)) == ()
    assert books.num_used_pages == 2  # the request still reads them
    books.release("asks")
    assert (books.num_used_pages, books.num_used_disk_pages) == (0, 0)
    capture(books, tokens(3))
    assert not any(isinstance(c, Write) for c in do_all(books))


@pytest.mark.parametrize("policy", ["mixture", "arc", "lru"])
def test_any_order_of_events_keeps_the_books_sound(policy: str) -> None:
    class Machine(LibraryMachine):
        def __init__(self) -> None:
            super().__init__(policy)

    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(Machine, settings=settings(max_examples=60, stateful_step_count=60, deadline=None))


class LibraryMachine(RuleBasedStateMachine):
    """Requests that capture, find, pin and end, over a disk that may fail and workers that are a step behind."""

    chunks = st.integers(0, 7)
    sizes = st.sampled_from([1, T, T + 1, 3 * T])
    requests = st.sampled_from(["a", "b", "c"])

    def __init__(self, policy: str) -> None:
        super().__init__()
        self.books = library(policy, num_disk_pages=NUM_DISK_PAGES)
        self.open: list[tuple[Reservation, int, float]] = []
        self.pinned: dict[str, list[ChunkVariant]] = {}
        self.held_pages: dict[tuple[ChunkKey, int], tuple[int, ...]] = {}
        self.disk: dict[tuple[ChunkKey, int], int] = {}
        self.running: list[Write | Read] = []
        self.told: list[int] = []
        self.is_down = False

    def ids(self, chunk: int) -> list[int]:
        return tokens(chunk, [1, T, T + 1, 3 * T, 2 * T, 5, 7, 4 * T][chunk])

    @rule(chunk=chunks, behind=st.integers(0, 3), request=requests, inherited=st.sampled_from([0.0, 0.5]))
    def reserve(self, chunk: int, behind: int, request: str, inherited: float) -> None:
        reservation = reserve(self.books, self.ids(chunk), behind=behind, request=request, inherited=inherited)
        if reservation is not None:
            assert len(reservation.pages) == num_pages_of(len(self.ids(chunk)), T)
            self.open.append((reservation, chunk, inherited))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), commits=st.booleans())
    def end_capture(self, data: st.DataObject, commits: bool) -> None:
        reservation, chunk, inherited = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        if not commits:
            self.books.abandon(reservation)
            return
        variant = self.books.commit(reservation, statistics(reservation.context, len(self.ids(chunk)), inherited))
        assert variant is None or self.books.pages(variant) == reservation.pages

    @rule(asked=st.lists(chunks, min_size=1, max_size=4), request=requests)
    def pin(self, asked: list[int], request: str) -> None:
        known = self.books.find({chunk_key(self.ids(chunk)): self.ids(chunk) for chunk in asked})
        variants = [known[chunk_key(self.ids(c))][-1] for c in asked if chunk_key(self.ids(c)) in known]
        if variants and self.books.pin(variants, request):
            self.pinned.setdefault(request, []).extend(variants)
            for variant in variants:
                self.books.record_use(variant, 0.25)

    @rule(request=requests)
    def release(self, request: str) -> None:
        self.books.release(request)
        self.pinned.pop(request, None)
        self.open = [(r, *rest) for r, *rest in self.open if r.request_id != request]

    @rule()
    def step(self) -> None:
        """Have the disk begin what it was asked to: deletions happen at once, transfers go on for a while."""
        if fence := self.books.begin_step():
            self.told.append(fence)
        for call in disk_of(self.books).take_calls():
            if isinstance(call, Drop):
                self.disk.pop((call.variant.key, call.variant.number), None)
            elif isinstance(call, Write):
                at = (call.chunk.variant.key, call.chunk.variant.number)
                assert at not in self.disk
                self.disk[at] = len(call.pages)
                assert sum(self.disk.values()) <= NUM_DISK_PAGES
                self.running.append(call)
            elif isinstance(call, Read):
                assert (call.variant.key, call.variant.number) in self.disk or self.is_down
                self.running.append(call)

    @precondition(lambda self: self.told)
    @rule()
    def end_step(self) -> None:
        self.books.end_step(self.told.pop(0))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), is_done=st.sampled_from([True, True, False]))
    def end_transfer(self, data: st.DataObject, is_done: bool) -> None:
        call = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        end(self.books, call, is_done=is_done and not self.is_down)

    @rule()
    @precondition(lambda self: not self.is_down)
    def reset(self) -> None:
        self.books.clear()
        self.is_down = True
        self.open, self.pinned = [], {}
        for request in ("a", "b", "c"):
            self.books.release(request)

    @invariant()
    def no_page_has_two_owners(self) -> None:
        stock = self.books._stock
        owned = [p for r in self.books._reservations.values() for one in r for p in one.pages]
        owned += [p for c in stock.chunks.values() for v in c.stored.values() for p in v.pages]
        owned += [*stock._called_off, *(p for pages in stock._fenced.values() for p in pages)]
        assert len(owned) == len(set(owned)) == self.books.num_used_pages <= NUM_PAGES

    @invariant()
    def what_is_pinned_and_was_not_lost_keeps_its_pages(self) -> None:
        held: dict[tuple[ChunkKey, int], tuple[int, ...]] = {}
        for variants in self.pinned.values():
            for variant in variants:
                at = (variant.key, variant.number)
                if self.books.is_on_host(variant):
                    held[at] = self.books.pages(variant)
                    assert held[at] == self.held_pages.get(at, held[at])
                elif at in self.held_pages:
                    raise AssertionError(f"{variant} left host memory while it was pinned")
        self.held_pages = held

    @invariant()
    def pages_of_a_transfer_stay_where_they_are(self) -> None:
        for call in self.running:
            variant = call.chunk.variant if isinstance(call, Write) else call.variant
            stored = self.books._stock.chunks[variant.key].stored[variant.number]
            assert stored.pages == call.pages

    @invariant()
    def the_sums_are_true(self) -> None:
        stock = self.books._stock
        variants = [v for c in stock.chunks.values() for v in c.stored.values()]
        assert stock._num_idle_pages == sum(v.num_pages for v in variants if v.is_idle and v.pages)
        assert stock._num_idle_disk_pages == sum(v.num_pages for v in variants if v.is_idle and v.is_on_disk)
        on_disk = sum(v.num_pages for v in variants if v.is_on_disk or v.is_writing)
        assert self.books.num_used_disk_pages == on_disk <= NUM_DISK_PAGES
        assert stock._num_writing_pages == sum(v.num_pages for v in variants if v.is_writing)
        assert all(v.pages or v.is_on_disk for v in variants)
        assert all(sum(not v.is_doomed for v in chunk.stored.values()) <= 2 for chunk in stock.chunks.values())
        assert len(stock.variants) == sum(not v.is_doomed for v in variants)
        assert all(chunk.num_variants for chunk in stock.chunks.values())

    def teardown(self) -> None:
        for request in ("a", "b", "c"):
            self.books.release(request)
        while self.running:
            end(self.books, self.running.pop())
        assert not any(v.num_pins for c in self.books._stock.chunks.values() for v in c.stored.values())


def _captured(books: ChunkManager, number: int, documents: Sequence[str], behind: Sequence[int] = ()) -> ChunkVariant:
    """Capture a chunk, the last of ``documents``, behind others."""
    ids, context = tokens(number), chunk_key([0, *behind])
    reservation = books.reserve(chunk_key(ids), ids, context, "r", inherits=0.0, documents=documents)
    assert reservation is not None
    prefix = tuple(chunk_key(tokens(each)) for each in behind)
    masses = (0.25,) * len(prefix)
    lengths = (2 * T,) * len(prefix)
    measured = ChunkStatistics(prefix, lengths, masses, 0.5, (0.125,) * len(ids), context=context)
    variant = books.commit(reservation, measured)
    assert variant is not None
    return variant


def test_a_forgotten_document_takes_all_its_variants_and_those_behind_it_along() -> None:
    books = library(num_disk_pages=NUM_DISK_PAGES)
    own = []
    for documents, before in ((["a"], []), (["b", "a"], [2])):
        own.append(_captured(books, 1, documents, before))
        do_all(books)
    behind = _captured(books, 3, ["b", "a", "c"], [2, 1])
    do_all(books)
    other = _captured(books, 2, ["b"])
    do_all(books)
    forgotten = books.forget({"a", "never stored"})
    assert forgotten.documents == {"a"}
    assert (forgotten.num_variants, forgotten.num_pages, forgotten.num_disk_pages) == (3, 6, 6)
    assert found(books, tokens(1)) == found(books, tokens(3)) == ()
    assert all(map(books.is_lost, [*own, behind]))
    assert found(books, tokens(2)) == (other,)
    assert books.num_forgotten() == 1, "disks are still to be overwritten"
    assert [type(call) for call in do_all(books)] == [Drop] * 3 + [Scrub], "in this order"
    assert books.num_forgotten() == 0
    assert not books.is_disk_down


def test_a_variant_goes_by_the_document_before_it_even_when_that_one_is_stored_no_more() -> None:
    books = library(num_disk_pages=NUM_DISK_PAGES)
    behind = _captured(books, 3, ["a", "c"], [1])
    do_all(books)
    assert books.forget({"a"}).documents == {"a"}
    assert books.is_lost(behind)


def test_the_same_tokens_under_another_id_are_forgotten_by_either() -> None:
    books = library(num_disk_pages=NUM_DISK_PAGES)
    variant = _captured(books, 1, ["a"])
    do_all(books)
    books.name(chunk_key(tokens(1)), "copy of a")
    (named,) = do_all(books)
    assert named == Names(((variant, frozenset({"a", "copy of a"})),))
    books.name(chunk_key(tokens(1)), "copy of a")
    assert do_all(books) == [], "once"
    assert books.forget({"copy of a"}).num_variants == 1
    assert books.is_lost(variant)


def test_what_a_request_reads_of_a_forgotten_document_goes_when_it_is_released() -> None:
    books = library(num_disk_pages=NUM_DISK_PAGES)
    variant = _captured(books, 1, ["a"])
    do_all(books)
    assert books.pin([variant], "reader")
    books.forget({"a"})
    assert found(books, tokens(1)) == ()
    do_all(books)
    assert books.num_forgotten() == 1
    books.release("reader")
    assert books.num_forgotten() == 1
    assert [type(call) for call in do_all(books)] == [Drop, Scrub]
    assert books.num_forgotten() == books.num_used_pages == books.num_used_disk_pages == 0


def test_what_a_start_finds_on_disk_is_known_by_its_documents() -> None:
    before = library(num_disk_pages=NUM_DISK_PAGES)
    _captured(before, 1, ["a"])
    (written,) = do_all(before)
    assert isinstance(written, Write)
    assert written.chunk.documents == {"a"}
    books = library(found=[written.chunk], num_disk_pages=NUM_DISK_PAGES)
    assert books.forget({"a"}).documents == {"a"}
    assert books.num_forgotten() == 1
    do_all(books)
    assert books.num_forgotten() == 0
