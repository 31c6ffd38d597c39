"""Which process listens on a port."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from ragcache_core.runtime.sessions import other_listener

_LISTEN = """
import socket, sys
server = socket.socket(); server.bind(("127.0.0.1", 0)); server.listen()
print(server.getsockname()[1], flush=True); sys.stdin.read()
"""


def test_a_port_of_another_session_is_distinguished_from_an_own_and_a_free_one() -> None:
    command = [sys.executable, "-c", _LISTEN]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as served:
        assert served.stdout is not None
        port = int(served.stdout.readline())
        assert other_listener(os.getsid(0), port) == served.pid
        assert other_listener(served.pid, port) is None
        served.communicate()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        assert other_listener(os.getsid(0), free.getsockname()[1]) is None
