"""The chunk store: payloads in the slot file, rows in the index, and a map of keys in memory.

A write is durable because of its order::

    reserve slots -> write payloads -> commit rows -> publish in memory -> return
                                       ^ acknowledged from here on

A crash before the commit leaves payloads without a row, a crash after it a stored chunk. The system keeps the writes of
a dead process, so nothing is flushed to the disk. Only a power cut can bring back rows whose payloads did not arrive,
or whose slots hold another chunk by now. They do not match their checksums, and are misses.

A deletion commits first and frees the slots then. A reader in flight to one of them may find another chunk there:
that does not match either, so it reads again while no write runs.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from ragcache_core.chunkstore.chunks import (
    ChunkEntry,
    ChunkNote,
    ChunkStoreStats,
    ChunkWrite,
    check_key,
    check_worth,
    checksum,
    contiguous,
)
from ragcache_core.chunkstore.compression import Compression, FrameBuffers
from ragcache_core.chunkstore.encryption import EncryptedSlotFile, Keys
from ragcache_core.chunkstore.index import IndexDamagedError, write_error
from ragcache_core.chunkstore.namespace import (
    DATA_NAME,
    Identity,
    changing,
    check_capacity,
    check_key_in_use,
    directory_error,
    enter,
    has_older_format,
    is_identity,
    namespace_path,
    note_key_in_use,
    write_identity,
)
from ragcache_core.chunkstore.old_namespaces import delete_old, delete_plaintext
from ragcache_core.chunkstore.opening import open_index, start_empty
from ragcache_core.chunkstore.readers import Readers
from ragcache_core.chunkstore.slotfile import SlotFile, page_aligned
from ragcache_core.errors import CacheCapacityError, CacheTierError, CacheWriteError
from ragcache_core.log import logger_of

if TYPE_CHECKING:
    from typing_extensions import Buffer


logger = logger_of(__name__)

_MAX_BATCH = 64
_MAX_BATCH_BYTES = 16 << 20
_FILLED_SHARE = 0.98  # of the capacity, with compressed chunks: a batch may take more than the mean
_KEPT_OF_MEAN = 0.8
_EXTENT_BYTES, _FEW_EXTENTS = 16, 1024  # what a file system has of a file beside its data


class ChunkStore:
    """Chunks of ``chunk_bytes`` by key, in one folder, with a limited number of slots.

    Any thread may call any method. Changes wait for one another; reads wait for nothing, unless what they found does
    not match its checksum.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        identity: Identity,
        *,
        chunk_bytes: int,
        capacity_bytes: int,
        direct: bool | None = None,
        match_keys: Collection[str] = (),
        keys: Keys | None = None,
        compression: Compression | None = None,
    ) -> None:
        """Open or create the store of ``identity`` in a cache directory. A damaged one is emptied with a warning.

        Args:
            directory: holds a folder for each identity; it and its parents are made where they are missing.
            identity: everything that chunks depend on, of texts and whole numbers: model, weights, dtype, block size,
                layout. Chunks of another identity are never read.
            chunk_bytes: size of every chunk; a part of the identity.
            capacity_bytes: the slots' limit on disk; the index (some 120 bytes a chunk) is not counted. With less than
                before, chunks are evicted: the deepest first, of those the least valuable.
            direct: use ``O_DIRECT``, do not, or (None) where the file system can.
            match_keys: entries of the identity that namespaces of the same model share. Where disk space is short, they
                are deleted; others only after 30 days without use.
            keys: encrypt chunks with the first of them, and read what any of them has encrypted; what the directory
                holds unencrypted, of any identity, is deleted. None: they are not encrypted. The index never is.
            compression: packs chunks before they are written. None: they are written as they are. What is there is
                read with either, and stays as it is; only 8-bit numbers are a miss unless it is ``int8``.

        Raises:
            CacheLockedError, CacheVersionError, CacheCapacityError, CacheWriteError
            CacheDirectoryError: also if the key of the stored chunks is not among ``keys``, if unencrypted data
                cannot be deleted, or if chunks are compressed and Blosc2 is not installed.
            CacheTierError: the index cannot be read at the moment.
            ValueError: chunk_bytes is not positive, or the identity holds something else.
        """
        if isinstance(chunk_bytes, bool) or not isinstance(chunk_bytes, int) or chunk_bytes < 1:
            raise ValueError(f"chunk_bytes is {chunk_bytes!r}: a chunk has at least 1 byte")
        identity = {**identity, "chunk_bytes": chunk_bytes}
        directory = Path(directory).absolute()
        if keys is not None:
            identity["encryption"] = "AES-256-GCM"
        self.path = namespace_path(directory, identity)
        self.chunk_bytes = chunk_bytes
        self._changing = threading.RLock()
        self._readers = Readers()
        self._num_damaged = self._num_read_errors = self._num_resets = 0
        self._compression = compression
        is_approximate = compression is not None and compression.is_approximate
        self._frames = FrameBuffers(chunk_bytes, is_approximate=is_approximate)
        with ExitStack() as opened:
            with changing(directory):
                opened.callback(enter(self.path).release)
                if isinstance(capacity_bytes, int):  # else it is refused below
                    delete_old(self.path, identity, wanted_bytes=capacity_bytes, match_keys=match_keys)
                if keys is not None:
                    delete_plaintext(self.path)
            try:
                if not is_identity(self.path, identity):
                    self._num_resets += start_empty(self.path, "does not say whose chunks they are")
                    write_identity(self.path, identity)
                elif has_older_format(self.path):
                    write_identity(self.path, identity)  # first: an older RAGCache must not take the index for damaged
                if keys is None:
                    self._file: SlotFile | EncryptedSlotFile = SlotFile(
                        self.path / DATA_NAME, chunk_bytes, direct=direct
                    )
                else:
                    check_key_in_use(self.path, keys)
                    self._file = EncryptedSlotFile(self.path / DATA_NAME, chunk_bytes, keys, direct=direct)
                opened.callback(self._file.close)
                num_slots = check_capacity(self.path, capacity_bytes, self._file.slot_bytes)
                self.capacity_bytes = num_slots * self._file.slot_bytes
                if compression is not None and compression.is_on and not self._file.can_free():
                    compression.stop(f"the file system of {directory} takes back no space inside a file")
                self._is_packed = compression is not None and compression.is_on
                self.num_slots = num_slots
                if compression is not None and compression.is_on:
                    self.num_slots *= compression.chunks_per_slot
                self._index, self._loaded = open_index(self.path, self._file, self.num_slots, self.capacity_bytes)
                self._num_resets += self._loaded.num_resets
                opened.callback(self._index.close)
                if keys is not None:
                    note_key_in_use(self.path, keys)
                self._places = [(path, path.stat()) for path in (self.path / DATA_NAME, self._index.path)]
            except (OSError, IndexDamagedError) as error:
                raise directory_error(directory, error) from error
            self._residents = self._loaded.residents
            self._new_bytes: float | None = None  # that a new chunk takes, a running mean
            if self._is_packed and self._file.used_bytes > self._residents.used_bytes + _EXTENT_BYTES * (
                len(self) + _FEW_EXTENTS
            ):
                self._free(self._residents.slots.left_over())  # as after a crash, or a start without compression
            self._opened = opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __contains__(self, key: object) -> bool:
        return key in self._residents

    def __len__(self) -> int:
        return len(self._residents)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a chunk on disk."""
        return self._file.slot_bytes

    @property
    def chunks_per_batch(self) -> int:
        """Number of chunks to read or write at once: 64, or 16 MiB, but at least one."""
        return min(max(_MAX_BATCH_BYTES // self.chunk_bytes, 1), _MAX_BATCH)

    @property
    def num_free_slots(self) -> int:
        """Number of chunks that can be written without deletions."""
        return self._residents.slots.num_free

    @property
    def is_direct(self) -> bool:
        """Whether I/O bypasses the page cache. It is fastest with page-aligned memory."""
        return self._file.is_direct

    @property
    def stats(self) -> ChunkStoreStats:
        """Statistics of the store."""
        return ChunkStoreStats(
            num_chunks=len(self),
            num_slots=self.num_slots,
            used_bytes=self._residents.used_bytes,
            num_damaged=self._num_damaged,
            num_missing=self._loaded.num_missing,
            num_read_errors=self._num_read_errors,
            num_resets=self._num_resets,
            num_over_capacity=self._loaded.num_over_capacity,
        )

    def num_over(self, num_here: int, num_new: int) -> int:
        """Return how many of ``num_here`` chunks must be evicted for ``num_new`` others; 0 or less for none.

        Of compressed chunks it is an estimate, by the mean of what is here and of what came lately.
        """
        num_over = num_here + num_new - self.num_slots
        if not self._is_packed:
            return num_over
        mean_bytes = self._residents.used_bytes / max(len(self), 1) or self.slot_bytes  # a change may be half done
        new_bytes = mean_bytes if self._new_bytes is None else self._new_bytes
        are_mixed = min(mean_bytes, new_bytes) < self.slot_bytes
        limit_bytes = self.capacity_bytes * (_FILLED_SHARE if are_mixed else 1)
        over_bytes = num_here * mean_bytes + num_new * new_bytes - limit_bytes
        return max(math.ceil(over_bytes / mean_bytes), num_over)

    def entries(self) -> Iterator[ChunkEntry]:
        """Yield every chunk by position, parents before children.

        Chunks that are deleted meanwhile may be in it, those that are written meanwhile are not. A chunk whose note has
        another place in the tree than was written, or impossible values, is dropped.

        Raises:
            CacheTierError: the index can no longer be read.
        """
        batches = self._index.entries()
        while True:
            with self._changing:
                self._check_open()
                batch = next(batches, None)
                if batch is None:
                    return
                slot_of = self._residents.slot_of
                here = [(key, entry) for slot, key, entry in batch if slot_of(key) == slot]
                odd = [key for key, entry in here if entry is None]
                if odd:
                    self._num_damaged += self.discard_many(odd)
            for _, entry in here:
                if entry is not None:
                    yield entry

    def read_many(self, requests: Sequence[tuple[bytes, Buffer]]) -> list[bool]:
        """Read chunks into buffers, and return for each whether it is stored.

        A buffer whose chunk was a miss may have been written to. Slots side by side are read at once, so ask for the
        chunks of a document together.

        Raises:
            ValueError: a buffer that is not of ``chunk_bytes``, not contiguous or read-only.
        """
        targets = [contiguous(target, self.chunk_bytes, writable=True) for _, target in requests]
        found = [False] * len(requests)
        with self._readers.one() as is_open:
            if not is_open:
                return found
            places = [self._residents.find(key) for key, _ in requests]
            wanted = [(number, place) for number, place in enumerate(places) if place is not None]
            records = self._frames.records([place.length for _, place in wanted], [targets[n] for n, _ in wanted])
            with suppress(OSError):  # they are read one by one below: one bad sector loses one chunk
                self._file.read([place.slot for _, place in wanted], records)
            for (number, place), record in zip(wanted, records, strict=True):
                key, target = requests[number][0], targets[number]
                is_sound = checksum(key, record) == place.digest and self._frames.unpack(record, target)
                found[number] = is_sound or self._read_again(key, target)
        return found

    def read(self, key: bytes, target: Buffer) -> bool:
        """Read one chunk into a buffer, and return whether it is stored."""
        return self.read_many([(key, target)])[0]

    def check_in_place(self) -> None:
        """Check that the store's files are in place.

        Deleted files can still be written to and read, and take space, until the process ends; the next start does not
        find them.

        Raises:
            CacheWriteError: they were deleted, moved or replaced, or cannot be reached.
        """
        for path, opened in self._places:
            try:
                is_here = os.path.samestat(path.stat(), opened)
            except FileNotFoundError:
                is_here = False
            except OSError as error:
                raise write_error(path, error) from error
            if not is_here:
                raise CacheWriteError(
                    f"{path} was deleted, moved or replaced while the engine ran, so new writes would be lost: leave "
                    "the directory to the engine"
                )

    def write_many(self, writes: Sequence[ChunkWrite], *, packs: bool = True) -> list[bytes]:
        """Store chunks and return the keys of new ones; stored ones stay unchanged.

        All or nothing: when this raises, none of them is there. When it returns, they outlive the process. They are
        compressed where the store does so, unless ``packs`` is False.

        Raises:
            CacheCapacityError: there are fewer free slots than new chunks, or too few bytes. CacheWriteError: the disk
                would not.
            ValueError: a key of no or more than 64 bytes, a buffer that is not contiguous or not of ``chunk_bytes``.
        """
        payloads: dict[bytes, tuple[memoryview, ChunkNote]] = {}
        for write in writes:
            check_key(write.key)
            payloads.setdefault(write.key, (contiguous(write.payload, self.chunk_bytes), write.note))
        with self._changing:
            self._check_open()
            self.check_in_place()
            new = [key for key in payloads if key not in self._residents]
            if len(new) > self.num_free_slots:
                raise CacheCapacityError(
                    f"{len(new)} chunks are new, {self.num_free_slots} of the {self.num_slots} slots in {self.path} "
                    "are free: delete some chunks first, or raise the capacity of the disk tier"
                )
            views = [payloads[key][0] for key in new]
            if self._compression is not None and packs:
                views = self._packed(self._compression, views)
            self._check_space(views)
            slots = self._residents.slots.reserve(len(new))
            try:
                # Before the write: a payload that changes meanwhile must not get a checksum that matches.
                digests = [checksum(key, view) for key, view in zip(new, views, strict=True)]
                begun_s = time.monotonic()
                try:
                    self._file.write(slots, views)
                except OSError as error:
                    raise write_error(self.path / DATA_NAME, error) from error
                if self._compression is not None:
                    self._compression.record_write(sum(map(len, views)), time.monotonic() - begun_s)
                lengths = list(map(len, views))
                notes = (payloads[key][1] for key in new)
                self._index.insert(zip(slots, new, digests, lengths, notes, strict=True))
            except BaseException:
                self._residents.slots.release(slots)
                self._free(slots)
                raise
            for key, slot, digest, length in zip(new, slots, digests, lengths, strict=True):
                self._residents.publish(key, slot, digest, length)
        return new

    def _packed(self, compression: Compression, chunks: list[memoryview]) -> list[memoryview]:
        """Return the records of chunks: a frame if it takes fewer pages."""
        pairs = zip(compression.pack(chunks), chunks, strict=True)
        return [record if page_aligned(len(record)) < self.slot_bytes else chunk for record, chunk in pairs]

    def _check_space(self, records: Sequence[memoryview]) -> None:
        """Raise CacheCapacityError if records do not fit; update the mean record size."""
        if not self._is_packed or not records:
            return
        new_bytes = sum(page_aligned(len(record)) for record in records)
        mean_bytes = new_bytes / len(records)
        self._new_bytes = mean_bytes + _KEPT_OF_MEAN * ((self._new_bytes or mean_bytes) - mean_bytes)
        free_bytes = self.capacity_bytes - self._residents.used_bytes
        if new_bytes > free_bytes:
            raise CacheCapacityError(
                f"{len(records)} chunks take {new_bytes:,} bytes, {free_bytes:,} of the {self.capacity_bytes:,} in "
                f"{self.path} are free: delete some chunks first, or raise the capacity of the disk tier"
            )

    def _free(self, slots: Sequence[int]) -> None:
        """Free the space of free slots, if the number of slots is not the limit."""
        if self._is_packed:
            with suppress(OSError):  # the next opening does it
                self._file.free(slots)

    def delete_many(self, keys: Iterable[bytes]) -> int:
        """Delete chunks and return their number; their slots are free at the return.

        Raises:
            CacheWriteError: all of them are still there.
        """
        with self._changing:
            self._check_open()
            gone = [key for key in dict.fromkeys(keys) if key in self._residents]
            if gone:
                self._index.delete(slot for key in gone if (slot := self._residents.slot_of(key)) is not None)
                self._free(self._residents.forget(gone))
        return len(gone)

    def evict_many(self, keys: Iterable[bytes]) -> int:
        """Delete chunks as :meth:`delete_many`, or on a full disk as :meth:`discard_many`."""
        keys = list(keys)
        try:
            return self.delete_many(keys)
        except CacheWriteError:
            return self.discard_many(keys)

    def discard_many(self, keys: Iterable[bytes]) -> int:
        """Delete useless chunks and return their number; their slots are free at the return.

        A disk that is full does not keep them: from there they go with the next change.
        """
        with self._changing:
            self._check_open()
            slots = {key: slot for key in keys if (slot := self._residents.slot_of(key)) is not None}
            self._free(self._residents.forget(list(slots)))
            if slots:
                self._index.discard(slots.values())
        return len(slots)

    def erase(self, keys: Iterable[bytes], on_part: Callable[[], object] = lambda: None) -> int:
        """Delete and overwrite chunks, and return their number; none of their bytes remain in a file.

        Nor is one of those that were deleted before, whose slots are free. ``on_part`` is called now and then: all of
        it may take seconds. The data goes first: that needs no space, which a full disk has not for the index.

        Raises:
            CacheWriteError: something may be left; what is, is found no more, at least until the next opening.
        """
        with self._changing:
            self._check_open()
            self.check_in_place()
            gone = {key: slot for key in keys if (slot := self._residents.slot_of(key)) is not None}
            self._residents.forget(list(gone))
            slots = self._residents.slots
            left_over = slots.left_over()
            try:
                self._file.erase(left_over, on_part)
            except OSError as error:
                raise write_error(self.path / DATA_NAME, error) from error
            finally:
                self._index.discard(gone.values())
            slots.mark_blank(left_over)
            self._index.scrub()
        return len(gone)

    def update_notes(self, worths: Iterable[tuple[bytes, float, float]]) -> int:
        """Update frequency and cost by key; return the number of known keys.

        Raises:
            CacheWriteError: none was changed. ValueError: a number that is not finite.
        """
        with self._changing:
            self._check_open()
            rows = []
            for key, frequency, cost in worths:
                check_worth(frequency, cost)
                slot = self._residents.slot_of(key)
                if slot is not None:
                    rows.append((frequency, cost, slot))
            self._index.update(rows)
        return len(rows)

    def rename(self, names: Iterable[tuple[bytes, str | None]]) -> int:
        """Update documents by key; return the number of known keys.

        A disk that is full does not keep them from it: they are noted with the next change.

        Raises:
            ValueError: a text that is too long.
        """
        with self._changing:
            self._check_open()
            rows = []
            for key, name in names:
                ChunkNote(doc_id=name)  # a text that cannot be noted must not wait for the next change
                if (slot := self._residents.slot_of(key)) is not None:
                    rows.append((slot, name))
            self._index.rename(rows)
        return len(rows)

    def clear(self) -> None:
        """Delete every chunk, and free the space.

        The data goes first: that needs no space, and what is left in the index then matches nothing.

        Raises:
            CacheWriteError: not all is gone from the disk. No chunk is found any more, at least until the next opening.
        """
        with self._changing:
            self._check_open()
            self._residents.clear()
            try:
                try:
                    self._file.truncate(0)
                finally:
                    self._index.clear()
                    self._index.scrub()
            except (OSError, CacheWriteError) as error:
                raise CacheWriteError(
                    f"{self.path} could not be emptied ({error.__cause__ or error}): see to the space and the health "
                    "of that disk, or delete the folder"
                ) from error

    def close(self) -> None:
        """Close the store after the reads in flight; later reads are misses. Idempotent."""
        self._readers.close()
        with self._changing:
            self._opened.close()

    def _check_open(self) -> None:
        if self._readers.is_closed:
            raise CacheTierError(f"the chunk store {self.path} is closed: open it again")

    def _read_again(self, key: bytes, target: memoryview) -> bool:
        """Read a chunk without concurrent writes, and drop it if it still does not match."""
        with self._changing:
            place = self._residents.find(key)
            if place is None:
                return False
            (record,) = self._frames.records([place.length], [target])
            try:
                self._file.read([place.slot], [record])
            except OSError as error:
                self._num_read_errors += 1
                if self._num_read_errors == 1:
                    logger.warning(
                        "RC-DISK-UNREADABLE: %s cannot be read (%s): a miss, and further ones are only counted",
                        self.path,
                        error,
                    )
                return False
            if checksum(key, record) == place.digest and self._frames.unpack(record, target):
                return True
            self._num_damaged += self.discard_many([key])
            if self._num_damaged == 1:
                logger.warning(
                    "RC-DISK-DAMAGED: a block of %s is damaged: a miss, and further ones are only counted", self.path
                )
            return False
