"""Workers meet where the engine's launcher cleans up, and all of one engine in the same place."""

from __future__ import annotations

import pytest

from ragcache_core.runtime.environment import SOCKETS_ENV
from ragcache_core.vllm_plugin.rendezvous import PrivateRendezvous


class Worker:
    """A platform's worker, as far as it matters here."""

    def __init__(self, rank: int, distributed_init_method: str) -> None:
        self.rank, self.distributed_init_method = rank, distributed_init_method


class OurWorker(PrivateRendezvous, Worker):
    """As ours are made."""


def test_the_file_at_which_workers_meet_lies_in_the_engines_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SOCKETS_ENV, "/dev/shm/ragcache-1-2-3-a")
    workers = [OurWorker(rank=i, distributed_init_method="file:///tmp/vllm_dist_0c7f") for i in range(2)]
    assert [worker.rank for worker in workers] == [0, 1]
    met = {worker.distributed_init_method for worker in workers}
    assert met == {"file:///dev/shm/ragcache-1-2-3-a/ragcache-1-2-3-a.vllm_dist_0c7f"}
