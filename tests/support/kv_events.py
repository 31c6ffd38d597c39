"""A consumer of vLLM's KV events that keeps book of what each tier holds, as a router does."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any, Self

import msgspec
import zmq
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch


class Book:
    """What the events so far say: block hashes by medium. Repeated stores of one hash are counted."""

    def __init__(self) -> None:
        self.told: dict[Any, BlockStored] = {}
        self.num_removed: Counter[str] = Counter()
        self.num_unnamed = 0
        """Stores that say nothing of the tokens."""
        self._held: dict[str, Counter[Any]] = defaultdict(Counter)

    def read(self, events: Iterable[Any]) -> None:
        """Take events in; what is removed must have been stored."""
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self._held["GPU"].clear()
                continue
            medium = event.medium or "GPU"
            held = self._held[medium]
            if isinstance(event, BlockStored):
                held.update(event.block_hashes)
                self.told.update(dict.fromkeys(event.block_hashes[-1:], event))
                self.num_unnamed += not event.token_ids
            elif isinstance(event, BlockRemoved):
                for block_hash in event.block_hashes:
                    assert held[block_hash] > 0, f"{medium} loses what it was not told to hold"
                    held[block_hash] -= 1
                    self.num_removed[medium] += 1

    def held(self) -> dict[str, set[Any]]:
        """Return what each medium holds, without those that hold nothing."""
        held = {medium: {key for key, num in keys.items() if num} for medium, keys in self._held.items()}
        return {medium: keys for medium, keys in held.items() if keys}


class KVEvents:
    """The book of one engine, read from the address at which it publishes; open before the engine is."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self._book = Book()
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self._next: int | None = None

    def __enter__(self) -> Self:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(self.endpoint)
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close(0)
        self._context.term()

    def read(self) -> Book:
        """Return the book as of what has arrived."""
        while self._socket.poll(100):
            _, number, payload = self._socket.recv_multipart()
            assert self._next in (None, int.from_bytes(number, "big")), "a batch was lost"
            self._next = int.from_bytes(number, "big") + 1
            self._book.read(self._decoder.decode(payload).events)
        return self._book
