"""The answer to liveness probes."""

from __future__ import annotations

import socket
import threading

import httpx
import pytest

from ragcache_core.client.launch.probes import ProbeServer
from ragcache_core.errors import ConfigError


def test_it_says_the_state_as_it_is_and_ends_with_its_context() -> None:
    state = ["loading"]
    num_threads = threading.active_count()
    with ProbeServer("127.0.0.1", 0, lambda: state[0]) as probes:
        url = f"http://127.0.0.1:{probes.port}"
        assert httpx.get(f"{url}/live").json() == {"state": "loading"}
        state[0] = "ready"
        answer = httpx.get(f"{url}/live?from=kubelet")
        assert (answer.status_code, answer.json()) == (200, {"state": "ready"})
        assert httpx.get(f"{url}/health").status_code == 404
        port = probes.port
    with socket.socket() as probe, pytest.raises(ConnectionRefusedError):
        probe.connect(("127.0.0.1", port))
    assert threading.active_count() == num_threads


def test_a_client_that_says_nothing_keeps_no_other_from_being_answered() -> None:
    with ProbeServer("127.0.0.1", 0, lambda: "ready") as probes, socket.socket() as silent:
        silent.connect(("127.0.0.1", probes.port))
        assert httpx.get(f"http://127.0.0.1:{probes.port}/live", timeout=5.0).status_code == 200


def test_a_port_that_is_taken_is_refused_with_its_number() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"probe_port {port}"):
            ProbeServer("127.0.0.1", port, lambda: "ready")
