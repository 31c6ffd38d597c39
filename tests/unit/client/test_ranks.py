"""A launch of several ranks: what each server gets of the machine, and that all of them start, or none."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from ragcache_core import memory
from ragcache_core.client import Engine, Fleet
from ragcache_core.client.http.remote_server import RemoteServerMonitor
from ragcache_core.client.launch import process, ranks
from ragcache_core.client.launch.launch import LaunchedServer
from ragcache_core.client.launch.ranks import launch_ranks, plan_ranks
from ragcache_core.client.launch.settings import LaunchSettings, VLLMOffload
from ragcache_core.config import CacheConfig
from ragcache_core.errors import ConfigError, EngineAuthError, EngineClosedError, EngineStartError
from tests.conftest import DEMO_MODEL, ROOT
from tests.support.scripted_process import FAILING_PORT
from tests.support.scripted_server import IDLE, THREE_TIERS, ScriptedServer
from tests.support.waiting import until

GIB = 1 << 30


@pytest.fixture(autouse=True)
def devices_here(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of devices: there is no GPU, until a test puts one there."""
    for name in ("CUDA_VISIBLE_DEVICES", "VLLM_CPU_OMP_THREADS_BIND"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(memory, "_DEVICES", folder := tmp_path_factory.mktemp("dev"))
    return folder


def plan(size: int, **settings: Any) -> list[dict[str, Any]]:
    return [dict(rank) for rank in plan_ranks(size, LaunchSettings(**{"model": "m", "cache": None, **settings}))]


def test_each_rank_has_a_port_of_its_own_and_all_have_one_key() -> None:
    planned = plan(4)
    assert len({rank["port"] for rank in planned}) == 4
    assert len({rank["api_key"] for rank in planned}) == 1
    assert {rank["api_key"] for rank in plan(2, api_key="mine")} == {"mine"}


def test_ports_follow_the_first_and_a_taken_one_is_reported_before_any_start() -> None:
    port = two_free_ports() + 1
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        with pytest.raises(EngineStartError, match=f"port {port} of 127.0.0.1 cannot be used"):
            plan(2, port=port - 1)
    first = two_free_ports()
    assert [rank["port"] for rank in plan(2, port=first)] == [first, first + 1]


def two_free_ports() -> int:
    """Return a port that is free, as the next one is."""
    while True:
        first = process.free_port("127.0.0.1")
        try:
            process.check_port_free("127.0.0.1", first + 1)
        except EngineStartError:
            continue
        return first


def test_host_memory_and_disk_are_divided_and_each_has_a_folder(tmp_path: Path) -> None:
    cache = CacheConfig(host_bytes="8GiB", disk_bytes="64GiB", directory=tmp_path, policy="lru")
    for i, rank in enumerate(plan(4, cache=cache)):
        assert rank["cache"] == CacheConfig(
            host_bytes="2GiB", disk_bytes="16GiB", directory=tmp_path / f"rank-{i}", policy="lru"
        )
    assert [rank["cache"] for rank in plan(2, cache=CacheConfig())] == [CacheConfig()] * 2, "the launch decides"
    offload = VLLMOffload(2 * GIB, directory=tmp_path)
    assert [rank["cache"] for rank in plan(2, cache=offload)] == [
        VLLMOffload(GIB, directory=tmp_path / f"rank-{i}") for i in range(2)
    ]
    assert [rank["cache"] for rank in plan(2)] == [None, None]


def test_kv_in_main_memory_is_that_of_all_ranks(devices_here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "read_memory", lambda: memory.Memory(total=8 * GIB, available=5 * GIB))
    cache = CacheConfig(kv_cache_bytes="2GiB")
    assert len(plan(2, cache=cache)) == 2
    with pytest.raises(
        ConfigError, match=r"is 2.0GiB for each of 3 ranks, this machine has 5.0GiB of memory free: lower"
    ):
        plan(3, cache=cache)
    for number in range(3):
        (devices_here / f"nvidia{number}").touch()
    assert len(plan(3, cache=cache)) == 3, "a GPU has memory of its own"


def test_each_rank_has_gpus_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def devices(size: int, **settings: Any) -> list[str]:
        return [rank["env"]["CUDA_VISIBLE_DEVICES"] for rank in plan(size, **settings)]

    here = {"CUDA_VISIBLE_DEVICES": "4,5, 6,7"}
    assert devices(2, env=here) == ["4", "5"]
    assert devices(2, env=here, vllm_args={"tensor_parallel_size": 2}) == ["4,5", "6,7"]
    assert devices(1, env=here, extra_args=["-tp", "2", "-pp=2"]) == ["4,5,6,7"]
    with pytest.raises(ConfigError, match="is 3 with 2 GPUs a rank, which needs 6; 4 are here: lower it, or name"):
        plan(3, env=here, vllm_args={"tensor_parallel_size": 2})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    assert devices(2) == ["GPU-a", "GPU-b"]


def test_unnamed_gpus_are_counted_as_cuda_counts_them(devices_here: Path) -> None:
    for name in ("nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm"):  # as in a container that has two of four
        (devices_here / name).touch()
    assert memory.has_gpu()
    assert [rank["env"] for rank in plan(2)] == [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}]
    with pytest.raises(ConfigError, match="is 3 with 1 GPUs a rank, which needs 3; 2 are here"):
        plan(3)
    hidden = plan(2, env={"CUDA_VISIBLE_DEVICES": ""})
    assert all("VLLM_CPU_OMP_THREADS_BIND" in rank["env"] for rank in hidden), "none is to be used"


def test_a_gpu_that_is_named_twice_is_refused_and_a_comma_at_the_end_names_none() -> None:
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES is '0, 0', which names a GPU twice: name each once"):
        plan(2, env={"CUDA_VISIBLE_DEVICES": "0, 0"})
    with pytest.raises(ConfigError, match="which needs 3; 2 are here"):
        plan(3, env={"CUDA_VISIBLE_DEVICES": "0,1,"})


def test_without_a_gpu_each_rank_has_cores_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def cores(size: int, **settings: Any) -> list[str | None]:
        return [rank["env"].get("VLLM_CPU_OMP_THREADS_BIND") for rank in plan(size, **settings)]

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 5, 6})
    assert cores(2) == ["0,1", "2,5"]
    assert cores(2, vllm_args={"tensor_parallel_size": 2}) == ["0|1", "2|5"]
    assert cores(6) == ["nobind"] * 6
    assert cores(2, env={"VLLM_CPU_OMP_THREADS_BIND": "0-3|4-7"}) == ["0-3", "4-7"]
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    assert cores(2) == [None, None], "as it is said for all"


def test_each_rank_has_a_log_and_reports_its_progress(tmp_path: Path) -> None:
    told: list[str] = []
    planned = plan(2, log_path=tmp_path / "server.log", progress=told.append)
    assert [rank["log_path"].name for rank in planned] == ["server-rank-0.log", "server-rank-1.log"]
    for rank in planned:
        rank["progress"]("loading weights")
    assert told == ["rank 0: loading weights", "rank 1: loading weights"]
    assert [rank["progress"] for rank in plan(3, progress=True)] == [True, False, False]
    assert [rank["log_path"] for rank in plan(2, log_path=Path("/dev/stderr"))] == [Path("/dev/stderr")] * 2


@pytest.mark.parametrize(
    "settings",
    [
        {"vllm_args": {"data_parallel_backend": "ray"}},
        {"vllm_args": {"enable_expert_parallel": True}},
        {"extra_args": ["--data-parallel-size=2"]},
        {"extra_args": ["-dp", "2"]},
    ],
)
def test_vllms_own_data_parallelism_is_not_mixed_with_ranks(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"a server a rank .* leave one of them out, or pass vLLM's own extra_args"):
        plan(2, **settings)


@dataclass
class Machine:
    """Starts servers as told: each rank waits until it is given up, fails, or is ready."""

    fates: list[BaseException | ScriptedServer | None]
    closed: list[int] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    all_begun: threading.Barrier = field(init=False)

    def __post_init__(self) -> None:
        self.all_begun = threading.Barrier(len(self.fates))

    def start(self, settings: LaunchSettings) -> LaunchedServer:
        assert settings.log_path is not None
        assert settings.cancel is not None
        assert settings.api_key is not None
        rank = int(settings.log_path.stem[-1])
        self.all_begun.wait(5)
        match self.fates[rank]:
            case None:
                assert settings.cancel.wait(5)
                self.ended.append(rank)
                raise EngineClosedError("the launch was given up")
            case ScriptedServer() as server:
                watch: Any = Watch(server, lambda: self.closed.append(rank))
                return LaunchedServer(f"{server.url}/v1", settings.api_key, watch, settings.log_path)
            case error:
                raise error

    def launch(self, **settings: Any) -> list[LaunchedServer]:
        given = {"model": "m", "cache": None, "log_path": Path("server.log"), "api_key": "key", **settings}
        return launch_ranks(self.start, LaunchSettings(**given), len(self.fates))


class Watch(RemoteServerMonitor):
    """What an engine owns of a server."""

    def __init__(self, server: ScriptedServer, on_close: Callable[[], object]) -> None:
        super().__init__(f"{server.url}/health", retry_timeout_s=0.0, hang_timeout_s=None)
        self._on_close = on_close

    def close(self, grace_s: float = 0.0) -> None:
        self._on_close()
        super().close(grace_s)


@pytest.fixture
def servers() -> Iterator[list[ScriptedServer]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(ScriptedServer(api_key="key", root=str(DEMO_MODEL), cache=dict(THREE_TIERS), load=IDLE))
            for _ in range(2)
        ]


def test_one_that_cannot_start_ends_the_others_and_is_named(servers: list[ScriptedServer]) -> None:
    machine = Machine([servers[0], EngineStartError("no room for the model"), None])
    with pytest.raises(EngineStartError, match=r"^rank 1 of 3, at port \d+: no room for the model$"):
        machine.launch()
    assert (machine.closed, machine.ended) == ([0], [2])


def test_an_interrupted_launch_ends_every_server(servers: list[ScriptedServer]) -> None:
    machine = Machine([servers[0], KeyboardInterrupt()])
    with pytest.raises(KeyboardInterrupt):
        machine.launch()
    assert machine.closed == [0]


def test_a_launch_that_is_interrupted_twice_ends_every_server(
    servers: list[ScriptedServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, real = Machine([*servers, KeyboardInterrupt(), None]), ranks.wait

    def again(given: Any, **how: Any) -> Any:
        if how:  # for servers that start
            return real(given, **how)
        raise KeyboardInterrupt

    monkeypatch.setattr(ranks, "wait", again)
    with pytest.raises(KeyboardInterrupt):
        machine.launch()
    assert (sorted(machine.closed), machine.ended) == ([0, 1], [3])


def test_a_launch_that_is_abandoned_ends_every_server(servers: list[ScriptedServer]) -> None:
    machine, cancel = Machine([servers[0], None]), threading.Event()
    cancel.set()
    with pytest.raises(EngineClosedError):
        machine.launch(cancel=cancel)
    assert (machine.closed, machine.ended) == ([0], [1])


def launched(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Fleet:
    monkeypatch.setattr("ragcache_core.client.engine.launch_server", machine.start)
    return Engine.launch(
        str(DEMO_MODEL), data_parallel_size=len(machine.fates), log_path="server.log", api_key="key", cache=None
    )


def test_a_launch_with_ranks_is_a_fleet_that_is_closed_as_one(
    servers: list[ScriptedServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(list(servers))
    with launched(machine, monkeypatch) as fleet:
        assert [engine.base_url for engine in fleet.engines] == [f"{server.url}/v1" for server in servers]
        assert fleet.generate("Hello").text
        assert not machine.closed
    assert sorted(set(machine.closed)) == [0, 1]


def test_a_fleet_that_cannot_be_made_leaves_no_server_behind(
    servers: list[ScriptedServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    servers[1].api_key = "another"
    machine = Machine(list(servers))
    with pytest.raises(EngineAuthError):
        launched(machine, monkeypatch)
    assert set(machine.closed) == {0, 1}


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "SERVER_MODULE", "tests.support.scripted_process")


def rank_processes() -> list[psutil.Process]:
    """Return the servers below this process."""
    return [child for child in psutil.Process().children() if "tests.support.scripted_process" in child.cmdline()]


def test_ranks_are_processes_that_start_and_end_together(processes: None, tmp_path: Path) -> None:
    with Engine.launch(
        str(DEMO_MODEL), data_parallel_size=2, cache=None, max_restarts=1, log_path=tmp_path / "server.log"
    ) as fleet:
        assert len(rank_processes()) == 2
        first, second = fleet.engines
        assert fleet.generate("Hello").text
        assert first.pid is not None
        psutil.Process(first.pid).kill()
        assert fleet.generate("Hello").text, "the other answers"
        assert until(lambda: first.num_restarts() == 1, 20)
        assert second.num_restarts() == 0
    assert until(lambda: not rank_processes(), 20)


def test_a_launch_with_one_failed_process_leaves_none(processes: None, tmp_path: Path) -> None:
    first = two_free_ports()
    with pytest.raises(EngineStartError, match=rf"rank 1 of 2, at port {first + 1}: .*no room for the model"):
        Engine.launch(
            str(DEMO_MODEL),
            data_parallel_size=2,
            cache=None,
            max_restarts=0,
            port=first,
            log_path=tmp_path / "server.log",
            env={FAILING_PORT: str(first + 1)},
        )
    assert until(lambda: not rank_processes(), 20)


OWNER = """
import signal, sys, time
from ragcache_core.client import Engine
from ragcache_core.client.launch import process

process.SERVER_MODULE = "tests.support.scripted_process"
fleet = Engine.launch(sys.argv[1], data_parallel_size=2, cache=None, log_path=sys.argv[2])
print(*[engine.pid for engine in fleet.engines], flush=True)
time.sleep(600)  # until it is killed
"""


@pytest.mark.slow
def test_ranks_end_with_the_program_that_launched_them(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OWNER, str(DEMO_MODEL), str(tmp_path / "server.log")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as owner:
        assert owner.stdout is not None
        pids = [int(pid) for pid in owner.stdout.readline().split()]
        assert len(pids) == 2
        assert all(psutil.pid_exists(pid) for pid in pids)
        owner.send_signal(signal.SIGTERM)
        owner.wait(timeout=60)
    assert until(lambda: not any(psutil.pid_exists(pid) for pid in pids), 30)
