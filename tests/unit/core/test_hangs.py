"""What hangs is told from what works, by what it uses of the processor, and by nothing else where there is a doubt."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.runtime.hangs import HangDetector, ProcessUse, read_engine_use, read_use

LOOK_S = 1.0


def core(cpu_s: float, *, is_stopped: bool = False) -> ProcessUse:
    return ProcessUse("VLLM::EngineCore", cpu_s, is_stopped, is_worker=False)


def worker(cpu_s: float, *, is_stopped: bool = False) -> ProcessUse:
    return ProcessUse("VLLM::Worker", cpu_s, is_stopped)


def hangs_after(
    detector: HangDetector, looks: Iterator[Mapping[int, ProcessUse]], look_s: float = LOOK_S
) -> tuple[float, str] | None:
    """Return when it said that they hang, and why."""
    for i, uses in enumerate(looks):
        if (why := detector.look(i * look_s, uses)) is not None:
            return i * look_s, why
    return None


@given(st.lists(st.floats(0.01, 100), min_size=60, max_size=60))
def test_a_step_that_computes_never_hangs_however_slow_the_machine_is(used: list[float]) -> None:
    """The core waits for it all the time; a starved worker gets one tick of ten milliseconds between two looks."""
    total = 0.0

    def looks() -> Iterator[Mapping[int, ProcessUse]]:
        nonlocal total
        for seconds in used:
            total += seconds
            yield {1: core(3.0), 2: worker(total)}

    assert hangs_after(HangDetector(limit_s=5, look_s=LOOK_S), looks()) is None


def test_an_engine_core_that_is_stopped_hangs_though_its_worker_polls() -> None:
    looks = ({1: core(3.0, is_stopped=True), 2: worker(0.01 * i)} for i in range(100))
    found = hangs_after(HangDetector(limit_s=5, look_s=LOOK_S), looks)
    assert found == (5, "VLLM::EngineCore (process 1) has been stopped for 5 s, and owes an answer")


def test_an_engine_core_that_waits_for_itself_hangs_though_its_worker_looks_for_work() -> None:
    looks = ({1: core(3.0), 2: ProcessUse("VLLM::Worker", 0.01 * i, is_asleep=True)} for i in range(100))
    found = hangs_after(HangDetector(limit_s=5, look_s=LOOK_S), looks)
    assert found is not None
    assert found[0] == 5


def test_a_stage_of_a_pipeline_may_wait_for_another_one() -> None:
    looks = ({1: core(3.0), 2: worker(1.0 * i), 3: worker(7.0)} for i in range(100))
    assert hangs_after(HangDetector(limit_s=5, look_s=LOOK_S, all_work=False), looks) is None
    still = ({1: core(3.0), 2: worker(1.0), 3: worker(7.0)} for _ in range(100))
    assert hangs_after(HangDetector(limit_s=5, look_s=LOOK_S, all_work=False), still) is not None


def test_time_without_checks_does_not_count() -> None:
    """The machine slept, or this process was stopped or starved: the engine may have been as well."""
    detector = HangDetector(limit_s=5, look_s=LOOK_S, step_limit_s=30)
    assert detector.look(0, {2: worker(1.0)}) is None
    assert detector.look(10_000, {2: worker(1.0)}) is None
    assert detector.look(20_000, {2: worker(1.0)}) is None


ENGINE = """
import subprocess, sys, setproctitle
def start(title, work):
    named = "import setproctitle; setproctitle.setproctitle(%r); print(flush=True); %s" % (title, work)
    child = subprocess.Popen([sys.executable, "-c", named], stdout=subprocess.PIPE)
    child.stdout.readline()
    return child
setproctitle.setproctitle("VLLM::EngineCore")
children = [start("VLLM::Worker", sys.argv[1]), start("compiler", "import time; time.sleep(600)")]
print(flush=True)
sys.stdin.read()
for child in children:
    child.kill()
"""
BUSY = "exec('while True: pass')"
LIMIT_S = 2.0
Start = Callable[[str], int]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts an engine of three processes below this one, as below a server, and returns the id of its core."""
    pytest.importorskip("setproctitle")
    running: list[subprocess.Popen[str]] = []

    def start(work: str) -> int:
        engine = subprocess.Popen(
            [sys.executable, "-c", ENGINE, work], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        running.append(engine)
        assert engine.stdout is not None
        engine.stdout.readline()
        return engine.pid

    yield start
    for engine in running:
        engine.send_signal(signal.SIGCONT)
        engine.communicate()


def look_for(seconds: float) -> str | None:
    detector = HangDetector(limit_s=LIMIT_S, look_s=0.1)
    ends_s = time.monotonic() + seconds
    while time.monotonic() < ends_s:
        if (why := detector.look(time.monotonic(), read_engine_use(os.getpid()))) is not None:
            return why
        time.sleep(0.1)
    return None


def test_a_real_worker_that_computes_does_not_hang_beside_a_helper_that_sleeps(start: Start) -> None:
    start(BUSY)
    assert len(read_engine_use(os.getpid())) == 2, "the core and its worker, and not what they started for themselves"
    assert look_for(1.5 * LIMIT_S) is None


def test_a_real_core_that_is_stopped_hangs_whatever_its_worker_does(start: Start) -> None:
    os.kill(start(BUSY), signal.SIGSTOP)
    why = look_for(20 * LIMIT_S) or ""
    assert "VLLM::EngineCore" in why
    assert "has been stopped" in why


SEVERAL = """
import subprocess, sys
titles = ["VLLM::APIServer_0", "VLLM::DPCoordinator", "VLLM::EngineCore", "compiler"]
named = "import setproctitle, time; setproctitle.setproctitle(%r); print(flush=True); time.sleep(600)"
children = [subprocess.Popen([sys.executable, "-c", named % title], stdout=subprocess.PIPE) for title in titles]
for child in children:
    child.stdout.readline()
print(*(child.pid for child in children), flush=True)
sys.stdin.read()
for child in children:
    child.kill()
"""


def test_servers_and_what_goes_between_them_and_the_engine_are_no_part_of_it() -> None:
    """They sleep while it works."""
    pytest.importorskip("setproctitle")
    with subprocess.Popen(
        [sys.executable, "-c", SEVERAL], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as main:
        assert main.stdout is not None
        core = int(main.stdout.readline().split()[2])
        assert [*read_engine_use(main.pid)] == [core]
        main.communicate()


def test_where_no_file_is_left_to_look_with_nothing_is_known_and_nothing_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_many(self: psutil.Process) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(psutil.Process, "cpu_times", too_many)
    assert read_use(os.getpid()) == {}
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert read_engine_use(os.getpid(), "") == {}
        monkeypatch.setattr(psutil.Process, "children", too_many)
        assert read_engine_use(os.getpid(), "") == {}
        child.kill()
