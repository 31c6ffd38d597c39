"""A server that is loading has all the time it needs, as long as it gets on."""

from __future__ import annotations

import pytest

from ragcache_core.client.launch.supervisor import Activity

TIMEOUT_S = 600.0
WAITING = "(EngineCore pid=7) INFO 11-25 08:{} [shm_broadcast.py:1] No available block found in 60 seconds\n"


class Server:
    """A server by a script: what it has logged and read so far, and what time it is."""

    def __init__(self) -> None:
        self.log, self.num_bytes, self.now_s = "", 0, 0.0
        self.activity = Activity(lambda: self.num_bytes, lambda: self.now_s)

    def is_stuck_after(self, seconds: float) -> bool:
        self.now_s += seconds
        return self.activity.is_stuck(self.log, TIMEOUT_S)


def test_a_server_that_does_nothing_is_stuck_when_patience_ends() -> None:
    server = Server()
    assert not server.is_stuck_after(TIMEOUT_S)
    assert server.is_stuck_after(1.0)


def test_new_lines_are_progress_however_long_it_takes() -> None:
    server = Server()
    for i in range(30):  # a terabyte from a slow disk
        server.log += f"Loading safetensors checkpoint shards: {i}/30\r"
        assert not server.is_stuck_after(TIMEOUT_S - 1.0)
    assert server.is_stuck_after(TIMEOUT_S + 1.0)


def test_the_same_words_again_are_none() -> None:
    server = Server()
    for minute in range(10):
        server.log += WAITING.format(minute)
        assert not server.is_stuck_after(60.0)
    server.log += WAITING.format(11)
    assert server.is_stuck_after(61.0)


@pytest.mark.parametrize(("num_bytes", "is_stuck"), [(1 << 30, False), (64 << 10, True)])
def test_reading_weights_is_progress_and_writing_the_log_is_none(num_bytes: int, is_stuck: bool) -> None:
    server = Server()
    server.num_bytes = 20 << 20
    assert not server.is_stuck_after(TIMEOUT_S + 1.0)
    server.num_bytes += num_bytes
    assert server.is_stuck_after(TIMEOUT_S + 1.0) is is_stuck


def test_processes_that_ended_take_what_they_read_with_them() -> None:
    server = Server()
    server.num_bytes = 1 << 30
    assert not server.is_stuck_after(TIMEOUT_S + 1.0)
    server.num_bytes = 1 << 20
    assert server.is_stuck_after(TIMEOUT_S + 1.0)
