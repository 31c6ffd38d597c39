"""``ragcache serve`` as containers run it: no root, a read-only root, 64 MiB of /dev/shm, probes, SIGTERM.

No container engine is needed: the test makes the namespaces itself. ``$TMPDIR`` stands for /tmp, mounted noexec as
Docker's ``--tmpfs`` does, and a folder stands for the image's volume.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from ragcache_core.client import Engine
from ragcache_core.client.launch.process import free_port
from tests.conftest import DEMO_MODEL, ROOT
from tests.support.waiting import until

pytestmark = pytest.mark.slow

KEY = "of-a-secret"
MIB = 1 << 20
HOST_BYTES = 128 * MIB
STARTUP_S = 240.0
CACHE_FOLDERS = re.findall(r"(\w+)=(/cache/\S+)", (ROOT / "examples/deployment/Dockerfile.cpu").read_text("utf-8"))
ENTER = ["unshare", "--user", "--mount", "--map-root-user", "sh", "-ec"]
CONTAINER = """
mount -t tmpfs -o size=64m,mode=1777 tmpfs /dev/shm
mount -t tmpfs -o mode=1777,noexec tmpfs "$TMPDIR"
mount -t tmpfs -o mode=1777 tmpfs "$VOLUME"
mount -o remount,bind,ro /
exec unshare --user --map-user=10001 --map-group=10001 "$@"
"""


def why_no_container(folder: Path, volume: Path) -> str | None:
    """Return why this machine allows no such namespace; ``None`` where it does."""
    try:
        made = subprocess.run(
            [*ENTER, CONTAINER, "sh", "true"],
            env={**os.environ, "TMPDIR": str(folder), "VOLUME": str(volume)},
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        return "there is no unshare here"
    return made.stderr.strip() or None


@contextmanager
def container(folder: Path, volume: Path, output: Path, port: int, live: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run ``ragcache serve`` over the demo model in a container, on every address and with a key of ours."""
    command = ["serve", str(DEMO_MODEL), "--host", "0.0.0.0", "--port", str(port), "--log", "-", "--drain", "120"]
    command += ["--probe-port", str(live), "--log-format", "json"]
    sizes = ["--kv-cache-bytes", "16MiB", "--host-bytes", str(HOST_BYTES), "--block-size", "32"]
    of_image = {name: value.replace("/cache", str(volume), 1) for name, value in CACHE_FOLDERS}
    vllm_args = ["--", "--max-model-len", "2048", "--dtype", "float32"]
    with (
        output.open("wb") as log,
        subprocess.Popen(
            [*ENTER, CONTAINER, "sh", sys.executable, "-m", "ragcache_core", *command, *sizes, *vllm_args],
            stdout=log,
            stderr=log,
            cwd=ROOT,
            env={**os.environ, **of_image, "TMPDIR": str(folder), "VOLUME": str(volume), "RAGCACHE_API_KEY": KEY},
        ) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def engine_core(server: psutil.Process) -> psutil.Process:
    """Return vLLM's engine process below a server."""
    return next(
        child for child in server.children(recursive=True) if "EngineCore" in " ".join([child.name(), *child.cmdline()])
    )


def test_a_container_serves_answers_its_probes_and_drains(tmp_path: Path) -> None:
    folder, volume, output = tmp_path / "tmp", tmp_path / "volume", tmp_path / "output"
    folder.mkdir()
    volume.mkdir()
    if (why := why_no_container(folder, volume)) is not None:
        pytest.skip(f"no namespace can be made here: {why}")
    port, live = free_port("127.0.0.1"), free_port("127.0.0.1")
    url = f"http://127.0.0.1:{port}"

    def probe(path: str) -> int:
        try:
            return httpx.get(url + path, timeout=10.0).status_code
        except httpx.TransportError:
            return 0

    def is_alive(state: str) -> bool:
        """Return whether the liveness probe is answered with a state; any answer is a success for it."""
        return bool(
            httpx.get(f"http://127.0.0.1:{live}/live", timeout=10.0).raise_for_status().json() == {"state": state}
        )

    with container(folder, volume, output, port, live) as process:
        said = lambda: output.read_text(errors="replace")  # noqa: E731
        assert until(lambda: bool(said()), 60.0)
        assert is_alive("loading")
        assert until(lambda: '"url"' in said() or process.poll() is not None, STARTUP_S)
        assert process.poll() is None, said()[-2000:]
        assert (probe("/ready"), probe("/health")) == (200, 200)
        assert httpx.post(f"{url}/v1/completions", json={}).status_code == 401
        tree = psutil.Process(process.pid).children(recursive=True)
        with Engine.connect(url, api_key=KEY) as engine:
            host = next(tier for tier in engine.stats().tiers if tier.name == "host")
            assert host.capacity_bytes == HOST_BYTES, "twice of what /dev/shm has room for"
            documents = [f"Document {i}: " + "Zorval was a company founded by Anna. " * 100 for i in range(6)]
            first, *_ = [engine.generate(document, max_tokens=4).text for document in documents]
            again = engine.generate(documents[0], max_tokens=4)
            assert again.text == first
            assert (again.stats.num_host_tokens or 0) > 0

            engine_core(psutil.Process(process.pid)).kill()
            assert until(lambda: is_alive("restarting"), 30.0), "a liveness probe kills no engine that loads again"
            assert probe("/ready") != 200
            assert until(lambda: is_alive("ready"), STARTUP_S)
            assert engine.generate(documents[0], max_tokens=4).text == first

            running = engine.stream("Document: Zorval", max_tokens=300, extra_body={"ignore_eos": True})
            next(running)
            core = engine_core(psutil.Process(process.pid))
            core.suspend()
            process.send_signal(signal.SIGTERM)
            assert until(lambda: probe("/ready") == 503, 30.0)
            assert is_alive("stopping")
            assert probe("/health") == 200, "it is alive, and must not be killed"
            refused = httpx.post(f"{url}/v1/completions", json={}, headers={"Authorization": f"Bearer {KEY}"})
            assert (refused.status_code, refused.headers["Retry-After"]) == (503, "2")
            core.resume()
            *_, last = running
            assert last.stats is not None
            assert last.stats.num_output_tokens == 300
        assert process.wait(timeout=60.0) == 0
        _, alive = psutil.wait_procs(tree, timeout=10.0)
        assert not alive
    written = output.read_text(errors="replace")
    lines = [json.loads(line) for line in written.splitlines()]
    assert "RC-ENGINE-RESTARTS" in {line.get("event") for line in lines}
    assert "Starting vLLM server" in written, "the log is on standard output"
    assert "stopping: running requests have 120 s" in written
