"""What a chunk store is worth after ``kill -9`` and after damage: writers killed at any instant, files cut and bits
turned at random.

A writer says over a pipe what it is about to do, does it, and says that it has; both survive its death. When it has
been killed, the store is opened again and every chunk that was ever written is asked for::

    writer   begin write(a, b) ... end   begin delete(a) ... <killed>
    allowed  b there with its bytes      a there with its bytes, or not there

A writer may also empty the store, note how chunks were used, and open it with room for fewer.
"""

from __future__ import annotations

import json
import logging
import math
import os
import random
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from ragcache_core.chunkstore import ChunkNote, ChunkStore, ChunkWrite
from ragcache_core.errors import CacheTierError, CacheWriteError

_IDENTITY = {"model": "killpoints"}
_CHUNK_BYTES = 16 << 10
_NUM_SLOTS = 96
_NUM_KEYS = 160
_MOST_OPERATIONS = 400  # enough for SQLite to merge its log into the database now and then
_MOST_CHUNKS = 8
_SHRINK, _READY, _WRITE, _DELETE, _CLEAR, _NOTE, _END = range(7)
_SHRINK_SHARE, _NOTE_SHARE, _CLEAR_SHARE = 0.1, 0.1, 0.002
_KILLED_AT_SELDOM_SHARE = 0.5
_HEADER = struct.Struct("<BIB")  # what, version (how many slots, for a shrink), number of keys
_ABSENT = 0


@dataclass(frozen=True, slots=True)
class KillpointResult:
    """``num_lost``: acknowledged chunks that were gone. ``num_wrong``: chunks with other bytes, or back from deletion.

    ``num_in_flight``: writers that died with a change begun and not acknowledged; ``num_shrinking`` and
    ``num_clearing`` of them as they opened the store with less room, or emptied it.
    """

    num_points: int
    num_lost: int
    num_wrong: int
    num_in_flight: int
    num_shrinking: int
    num_clearing: int


@dataclass(frozen=True, slots=True)
class DamageResult:
    """``num_wrong``: chunks that were served with other bytes. ``num_refused``: stores that would not open.

    ``num_missed``: chunks that the damage made a miss of.
    """

    num_points: int
    num_wrong: int
    num_refused: int
    num_missed: int


def run_killpoints(directory: Path, num_points: int, seed: int) -> KillpointResult:
    """Kill that many writers of one store in ``directory``, which is empty, and return what was lost or wrong."""
    return KillpointResult(**_in_new_process("killpoints", directory, num_points, seed))


def run_damage(directory: Path, num_points: int, seed: int) -> DamageResult:
    """Damage a file of a store in ``directory``, which is empty, that many times and return what was served wrong.

    The store is one whose writer was killed, so that there is a log beside the database; it is sound before each time.
    """
    return DamageResult(**_in_new_process("damage", directory, num_points, seed))


def _in_new_process(mode: str, directory: Path, num_points: int, seed: int) -> dict[str, int]:
    """Run in a process without threads, which may fork."""
    command = [sys.executable, "-m", __name__, mode, str(directory), str(num_points), str(seed)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    result: dict[str, int] = json.loads(done.stdout)
    return result


def _open(directory: Path, num_slots: int = _NUM_SLOTS) -> ChunkStore:
    capacity_bytes = num_slots * _CHUNK_BYTES
    return ChunkStore(directory, _IDENTITY, chunk_bytes=_CHUNK_BYTES, capacity_bytes=capacity_bytes)


def _rng(seed: int) -> random.Random:
    return random.Random(seed)


def _key(number: int) -> bytes:
    return b"key %03d" % number


def _payload(number: int, version: int) -> bytes:
    return _rng(number << 32 | version).randbytes(_CHUNK_BYTES)


@dataclass(slots=True)
class _Model:
    """What may be there: for each key the versions it may have, 0 for none, and those it ever had.

    ``least_left``: how many chunks have to be there while the store is opened with less room, whichever they are.
    """

    allowed: list[set[int]] = field(default_factory=lambda: [{_ABSENT} for _ in range(_NUM_KEYS)])
    ever: list[set[int]] = field(default_factory=lambda: [{_ABSENT} for _ in range(_NUM_KEYS)])
    last_version: int = 0
    pending: tuple[int, int, bytes] | None = None
    least_left: int | None = None
    is_ready: bool = False
    num_ended: int = 0

    @property
    def num_there(self) -> int:
        """How many chunks have to be there."""
        return sum(_ABSENT not in versions for versions in self.allowed)

    @property
    def is_at_seldom(self) -> bool:
        """Whether the writer is at something that it seldom does: to open with less room, or to forget everything."""
        return self.least_left is not None or (self.pending is not None and self.pending[0] == _CLEAR)

    def hear(self, what: int, version: int, numbers: bytes) -> None:
        """Take in one message of a writer."""
        if what == _SHRINK:
            self.least_left = min(self.num_there, version)
            for versions in self.allowed:
                versions.add(_ABSENT)
        elif what == _READY:
            self.is_ready, self.least_left = True, None
            for number, versions in enumerate(self.allowed):
                if number in numbers:
                    self.allowed[number] = {_ABSENT}
                elif len(versions) > 1:
                    versions.discard(_ABSENT)
        elif what == _END:
            assert self.pending is not None
            for number in self.pending[2]:
                self.allowed[number] = {self.pending[1]}
            self.pending = None
            self.num_ended += 1
        else:
            self.pending = (what, version, b"" if what == _NOTE else numbers)
            self.last_version = max(self.last_version, version)
            for number in self.pending[2]:
                self.allowed[number].add(version)
                self.ever[number].add(version)


class _Pipe:
    """A writer's messages, whole ones."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._rest = b""

    def drain(self, model: _Model, timeout_s: float) -> bool:
        """Hear what has arrived and return False when the writer is gone and all of it was heard."""
        if not select.select([self._descriptor], [], [], timeout_s)[0]:
            return True
        data = os.read(self._descriptor, 1 << 16)
        self._rest += data
        while len(self._rest) >= _HEADER.size:
            what, version, count = _HEADER.unpack_from(self._rest)
            end = _HEADER.size + count
            if len(self._rest) < end:
                break
            model.hear(what, version, self._rest[_HEADER.size : end])
            self._rest = self._rest[end:]
        return bool(data)


def _write_until_killed(directory: Path, say: int, model: _Model, rng: random.Random, *, seldom: bool) -> None:
    """Change the store at random for as long as the process lives; ``seldom``: open it with less room, or empty it."""

    def record(what: int, version: int = 0, numbers: bytes = b"") -> None:
        os.write(say, _HEADER.pack(what, version, len(numbers)) + numbers)

    version = model.last_version
    num_slots = rng.randint(_NUM_SLOTS // 2, _NUM_SLOTS) if seldom and rng.random() < _SHRINK_SHARE else _NUM_SLOTS
    num_before = model.num_there
    if num_slots < num_before:
        record(_SHRINK, num_slots)
    store = _open(directory, num_slots)
    if seldom and len(store) != min(num_before, num_slots):  # every chunk was looked at before
        raise RuntimeError(f"{num_before} chunks in {num_slots} slots are {len(store)}")
    record(_READY, numbers=bytes(n for n in range(_NUM_KEYS) if _key(n) not in store))
    while True:
        here = [n for n in range(_NUM_KEYS) if _key(n) in store]
        away = [n for n in range(_NUM_KEYS) if _key(n) not in store]
        count = min(rng.randint(1, _MOST_CHUNKS), len(away))
        kind = rng.random()
        if seldom and kind < _CLEAR_SHARE:
            record(_CLEAR, _ABSENT, bytes(here))
            store.clear()
        elif kind < _CLEAR_SHARE + _NOTE_SHARE:
            record(_NOTE)
            store.update_notes([(_key(n), rng.random() * 100, rng.random()) for n in here])
        elif count <= store.num_free_slots and (not here or rng.random() < 0.6):
            version += 1
            numbers = bytes(rng.sample(away, count))
            writes = [ChunkWrite(_key(n), _payload(n, version), ChunkNote(position=n)) for n in numbers]
            record(_WRITE, version, numbers)
            store.write_many(writes)
        else:
            numbers = bytes(rng.sample(here, min(len(here), rng.randint(1, _MOST_CHUNKS))))
            record(_DELETE, _ABSENT, numbers)
            store.delete_many([_key(n) for n in numbers])
        record(_END)
        if rng.random() < 0.2:
            store.read(_key(rng.randrange(_NUM_KEYS)), bytearray(_CHUNK_BYTES))


def _fork_writer(directory: Path, model: _Model, seed: int, *, seldom: bool) -> tuple[int, int]:
    hear, say = os.pipe()
    child = os.fork()
    if child:
        os.close(say)
        return child, hear
    try:
        os.close(hear)
        _write_until_killed(directory, say, model, _rng(seed), seldom=seldom)
    except BaseException as error:  # a writer that fails must not go on as its parent
        print(f"writer failed: {error!r}", file=sys.stderr)
    os._exit(1)


def _kill_one(directory: Path, model: _Model, rng: random.Random, *, seldom: bool = False) -> None:
    """Let a writer work for a while, kill it, and hear what it had said."""
    model.is_ready, model.num_ended, model.least_left = False, 0, None
    started_s = time.perf_counter()
    child, descriptor = _fork_writer(directory, model, rng.getrandbits(32), seldom=seldom)
    pipe = _Pipe(descriptor)
    if rng.random() < 0.1:  # somewhere between its first instruction and its first changes
        delay_s, num_operations = rng.uniform(0, 0.02), 0
    else:
        num_operations = int(math.exp(rng.uniform(0, math.log(_MOST_OPERATIONS))))
        waits_for_seldom = rng.random() < _KILLED_AT_SELDOM_SHARE
        while (model.num_ended < num_operations or model.pending is None) and pipe.drain(model, 10):
            if waits_for_seldom and model.is_at_seldom:
                break
        # A change takes 0.2 to 0.4 ms; to open with less room takes longer.
        started_s, delay_s = time.perf_counter(), rng.uniform(0, 0.004 if model.least_left is not None else 0.0005)
    while time.perf_counter() - started_s < delay_s:
        pass
    os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    while pipe.drain(model, 10):
        pass
    os.close(descriptor)
    if status != -signal.SIGKILL:
        raise RuntimeError(f"a writer ended with status {status} before it was killed")


def _read_all(store: ChunkStore, model: _Model, found: Callable[[int, int | None], None]) -> None:
    """Read every chunk that was ever written and report the version whose bytes it has, None if it has others'."""
    target = bytearray(_CHUNK_BYTES)
    for number in range(_NUM_KEYS):
        if not store.read(_key(number), target):
            found(number, _ABSENT)
            continue
        versions = [*model.allowed[number], *(model.ever[number] - model.allowed[number])]
        found(number, next((v for v in versions if v and _payload(number, v) == target), None))


def _measure_killpoints(directory: Path, num_points: int, seed: int) -> KillpointResult:
    rng, model = _rng(seed), _Model()
    num_lost = num_wrong = num_in_flight = num_shrinking = num_clearing = 0

    def judge(number: int, version: int | None) -> None:
        nonlocal num_lost, num_wrong
        if version == _ABSENT:
            num_lost += version not in model.allowed[number]
        else:
            num_wrong += version not in model.allowed[number]
        model.allowed[number] = {version or _ABSENT}

    for _ in range(num_points):
        _kill_one(directory, model, rng, seldom=True)
        num_shrinking += model.least_left is not None
        num_clearing += model.pending is not None and model.pending[0] == _CLEAR
        num_in_flight += model.pending is not None or model.least_left is not None
        model.pending = None
        with _open(directory) as store:
            _read_all(store, model, judge)
            num_lost += store.stats.num_resets  # an empty store would be a lot of losses: never pass over it
        if model.least_left is not None:
            num_lost += max(0, model.least_left - model.num_there)
    return KillpointResult(num_points, num_lost, num_wrong, num_in_flight, num_shrinking, num_clearing)


def _measure_damage(directory: Path, num_points: int, seed: int) -> DamageResult:
    rng, written = _rng(seed), _Model()
    for _ in range(3):
        _kill_one(directory, written, rng)
    _open(directory).close()  # merges the log, so that there is something in the database as well
    for _ in range(3):
        _kill_one(directory, written, rng)
    (folder,) = (path for path in directory.iterdir() if path.is_dir())
    sound = {path: path.read_bytes() for path in folder.iterdir()}
    targets = [path for path, content in sound.items() if content and path.suffix != ".json"]
    num_wrong = num_refused = num_missed = 0

    def judge(number: int, version: int | None) -> None:
        nonlocal num_wrong, num_missed
        num_wrong += version is None
        num_missed += version == _ABSENT and _ABSENT not in written.allowed[number]

    for _ in range(num_points):
        for path in folder.iterdir():
            if path not in sound:
                path.unlink()
        for path, content in sound.items():
            path.write_bytes(content)
        _damage(rng.choice(targets), rng)
        model = replace(written, ever=[set(versions) for versions in written.ever])  # a cut log brings old ones back
        try:
            with _open(directory) as store:
                _read_all(store, model, judge)
                _write_more(store, model, rng)
                _read_all(store, model, judge)
            with _open(directory) as store:
                _read_all(store, model, judge)
        except CacheTierError as error:
            num_refused += 1
            print(f"refused: {error}", file=sys.stderr)
    return DamageResult(num_points, num_wrong, num_refused, num_missed)


def _damage(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    start = rng.randrange(len(content))
    kind = rng.choice(("cut", "bit", "bits", "zeros", "noise"))
    if kind == "cut":
        del content[start:]
    elif kind in ("bit", "bits"):
        for _ in range(1 if kind == "bit" else 64):
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    else:
        length = min(rng.randint(1, 1 << 14), len(content) - start)
        content[start : start + length] = bytes(length) if kind == "zeros" else rng.randbytes(length)
    path.write_bytes(content)


def _write_more(store: ChunkStore, model: _Model, rng: random.Random) -> None:
    """Write some chunks that are not there into the damaged store; an index that is beyond writing may refuse them."""
    away = [n for n in range(_NUM_KEYS) if _key(n) not in store]
    numbers = rng.sample(away, min(_MOST_CHUNKS, len(away), store.num_free_slots))
    version = model.last_version + 1
    for number in numbers:
        model.ever[number].add(version)
    with suppress(CacheWriteError):
        store.write_many([ChunkWrite(_key(n), _payload(n, version)) for n in numbers])


def _main(mode: str, directory: str, num_points: str, seed: str) -> None:
    logging.getLogger("ragcache.core.chunkstore").setLevel(logging.ERROR)  # damage is what this is about
    measure: Callable[[Path, int, int], KillpointResult | DamageResult] = (
        _measure_killpoints if mode == "killpoints" else _measure_damage
    )
    print(json.dumps(asdict(measure(Path(directory), int(num_points), int(seed)))))


if __name__ == "__main__":
    _main(*sys.argv[1:])
