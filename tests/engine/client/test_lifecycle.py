"""A launched server ends with its owner, whatever happens to either, and comes back once if it dies.

These tests start servers of their own (the session's engine must not be killed); each test gets as much out of one
start as it can.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from ragcache_core.client import Engine, GenerationChunk
from ragcache_core.client.launch.process import GRACE_S
from ragcache_core.errors import EngineDiedError, EngineStartError
from tests.conftest import DEMO_MODEL, ENGINE_ARGS
from tests.support.asking_ahead import speculate

pytestmark = pytest.mark.slow

LONG: dict[str, Any] = {"max_tokens": 1500, "n": 4, "temperature": 1.0, "extra_body": {"ignore_eos": True}}
GREEDY: dict[str, Any] = {"max_tokens": 500, "temperature": 0.0, "extra_body": {"ignore_eos": True}}
SAMPLED: dict[str, Any] = {**GREEDY, "temperature": 1.0, "stop": ["no such text"]}
SAMPLED["extra_body"] = {"ignore_eos": True, "top_k": 1}
"""Sampled, for the client, among one token: the answer is the greedy one, and shows any token too many or too few."""


def wait_until(condition: Callable[[], bool], timeout_s: float = GRACE_S + 10) -> bool:
    """Return whether ``condition`` came true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def session_members(session_id: int) -> list[str]:
    """Return the processes of a server's session that still live."""
    alive = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session_id and process.status() != psutil.STATUS_ZOMBIE:
                alive.append(" ".join(process.cmdline()))
        except (OSError, psutil.Error):
            continue
    return alive


def shared_memory(session_id: int) -> set[Path]:
    """Return what a server has in shared memory: what its processes have mapped, and what is named after it."""
    engine_id = psutil.Process(session_id).environ()["RAGCACHE_ENGINE_ID"]
    files = set(Path("/dev/shm").glob(f"*{engine_id}*"))
    assert {path.suffix for path in files} >= {"", ".mmap"}, "sockets, and host memory"
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session_id:
                maps = Path(f"/proc/{process.pid}/maps").read_text()
                files |= {Path(line.split(None, 5)[5]) for line in maps.splitlines() if "/dev/shm/" in line}
        except (OSError, psutil.Error):
            continue
    return files


def leaked(files: set[Path]) -> set[Path]:
    """Return which of the files still exist."""
    return {file for file in files if file.exists() or file.is_symlink()}


def engine_core(engine: Engine) -> psutil.Process:
    """Return vLLM's engine process below the API server."""
    assert engine.pid is not None
    children = psutil.Process(engine.pid).children(recursive=True)
    return next(p for p in children if "EngineCore" in " ".join([p.name(), *p.cmdline()]))


async def suspend_after_the_first_tokens(
    core: psutil.Process, *streams: AsyncGenerator[GenerationChunk]
) -> list[GenerationChunk]:
    """Suspend the engine when all answers have begun, and run it in short pulses until then; return their beginnings.

    The server waits for a core while the engine and its worker spin on theirs. On a busy machine it is seconds late,
    and a whole answer has been computed when its first token is seen.
    """
    first = [asyncio.ensure_future(anext(stream)) for stream in streams]
    while not all(each.done() for each in first):
        core.resume()
        await asyncio.sleep(0.02)  # a pulse: a few steps of the hundreds that an answer takes
        core.suspend()
        await asyncio.wait(first, timeout=0.2)
    assert all(each.result().text for each in first)
    return [each.result() for each in first]


@pytest.mark.alone
def test_an_engine_that_hangs_is_restarted_and_every_request_recovers_that_can(tmp_path: Path) -> None:
    """Those before their first token are sent again, also one that waits for the tokens of its speculation, which
    fails. Streams continue, but for one with several answers. A second death within the window is the last."""
    shared: set[Path] = set()
    temporary = tmp_path / "tmp"
    temporary.mkdir()

    async def scenario() -> None:
        async with await Engine.alaunch(
            str(DEMO_MODEL),
            log_path=tmp_path / "log",
            env={"TMPDIR": str(temporary)},
            hang_timeout_s=2.0,
            max_restarts=1,
            **ENGINE_ARGS,
        ) as engine:
            expected = (await engine.agenerate("Document: Zorval", max_tokens=5)).text
            key, url, session = engine.api_key, engine.base_url, engine.pid
            assert session is not None
            shared.update(shared_memory(session))
            assert shared

            greedy = [
                await engine.agenerate(prompt, **GREEDY)
                for prompt in ("Document: Zorval", [{"role": "user", "content": "Who founded Zorval?"}])
            ]
            stream = engine.astream("Document: Zorval", **LONG)
            going_on = [
                engine.astream(prompt, **GREEDY)
                for prompt in ("Document: Zorval", [{"role": "user", "content": "Who founded Zorval?"}])
            ]
            going_on += [engine.astream("Document: Zorval", **SAMPLED)]
            greedy += greedy[:1]
            core = engine_core(engine)
            document = "Document: " + "Zorval was a company founded by Anna. " * 20
            stored = (await engine.agenerate(document, max_tokens=5)).text
            await asyncio.sleep(0.5)  # it is noted a little later
            _, *begun = await suspend_after_the_first_tokens(core, stream, *going_on)  # the next has none
            waiting = asyncio.create_task(engine.agenerate("Document: Zorval", max_tokens=5))
            ahead = speculate(engine, lambda: engine.generate("Document: Tenrik", max_tokens=5))
            joined = asyncio.create_task(engine.agenerate("Document: Tenrik", max_tokens=5))
            await asyncio.sleep(0.5)  # it has joined what gives no token
            with pytest.raises(EngineDiedError, match="ask again"):
                while True:
                    await anext(stream)
            for first, rest, whole in zip(begun, going_on, greedy, strict=True):
                chunks = [first, *[chunk async for chunk in rest]]
                assert len(first.text) < len(whole.text), "it was cut in the middle"
                assert "".join(chunk.text for chunk in chunks) == whole.text
                assert chunks[-1].finish_reason == whole.finish_reason
                stats = chunks[-1].stats
                assert stats is not None
                assert stats.num_output_tokens == whole.stats.num_output_tokens == GREEDY["max_tokens"]
                assert stats.num_prompt_tokens == whole.stats.num_prompt_tokens
                assert stats.num_resumes > 0
            assert stats.is_resampled, "the last one is sampled"
            assert (await waiting).text == expected
            assert (await joined).text == (await engine.agenerate("Document: Tenrik", max_tokens=5)).text
            assert ahead.is_failed
            again = await engine.agenerate(document, max_tokens=5)
            assert again.text == stored
            assert (again.stats.num_host_tokens or 0) > 0, "without a disk, host memory outlives the engine"
            assert (await engine.astats()).num_restarts == 1
            assert (engine.api_key, engine.base_url) == (key, url)
            assert engine.pid != session
            assert session_members(session) == []

            assert engine.pid is not None
            second_session = engine.pid
            shared.update(shared_memory(second_session))
            os.kill(engine.pid, signal.SIGKILL)  # the API server itself this time
            with pytest.raises(EngineDiedError, match="restarted 1 times, the limit"):
                while True:
                    await engine.agenerate("Document: Zorval", max_tokens=5)
            assert session_members(second_session) == []
        assert session_members(second_session) == []

    asyncio.run(scenario())
    assert wait_until(lambda: not leaked(shared)), leaked(shared)
    left = [path for path in temporary.iterdir() if path.is_socket() or path.name.startswith("vllm_dist")]
    assert left == [], "vLLM lets its sockets and the file at which workers meet lie"


OWNER = """
import sys, time
from ragcache_core.client import Engine, GenerationChunk
from tests.conftest import DEMO_MODEL, ENGINE_ARGS
engine = Engine.launch(str(DEMO_MODEL), log_path=sys.argv[1], **ENGINE_ARGS)
print(engine.pid, flush=True)
time.sleep(600)
"""


def test_the_server_ends_with_its_owner(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OWNER, str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as owner:
        assert owner.stdout is not None
        session = int(owner.stdout.readline())
        shared = shared_memory(session)
        assert shared
        owner.kill()
        owner.wait(timeout=60)
    assert wait_until(lambda: not session_members(session)), session_members(session)
    assert wait_until(lambda: not leaked(shared)), leaked(shared)


def test_a_server_that_cannot_start_reports_why_in_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(EngineStartError, match="max_model_len") as refused:
        Engine.launch(
            str(DEMO_MODEL),
            log_path=tmp_path / "log",
            hf_overrides={"max_position_embeddings": 1024},
            **ENGINE_ARGS,
        )
    assert "\n" not in str(refused.value)
    assert str(tmp_path / "log") in str(refused.value)
    assert (tmp_path / "log").stat().st_size > 0


def test_a_start_without_progress_is_aborted_and_leaves_nothing(tmp_path: Path) -> None:
    started: list[str] = []
    with pytest.raises(EngineStartError, match="had made no progress for 0.5 s: raise startup_timeout_s"):
        Engine.launch(
            str(DEMO_MODEL), log_path=tmp_path / "log", startup_timeout_s=0.5, progress=started.append, **ENGINE_ARGS
        )
    assert started
    mine = [p for p in psutil.process_iter() if str(tmp_path) in " ".join(_cmdline(p))]
    assert mine == []


async def test_a_cancelled_launch_leaves_nothing(tmp_path: Path) -> None:
    children_before = {p.pid for p in psutil.Process().children(recursive=True)}
    launching = asyncio.create_task(Engine.alaunch(str(DEMO_MODEL), log_path=tmp_path / "log", **ENGINE_ARGS))
    await asyncio.sleep(1.0)
    launching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await launching

    def gone() -> bool:
        return {p.pid for p in psutil.Process().children(recursive=True)} <= children_before

    assert await asyncio.to_thread(wait_until, gone, 120.0)


def _cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_an_owner_that_is_killed_while_the_server_loads_leaves_nothing(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-c", OWNER, str(log)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as owner:
        assert wait_until(lambda: log.exists() and "Starting to load model" in log.read_text(), 120)
        (server,) = psutil.Process(owner.pid).children()
        session = server.pid
        assert len(session_members(session)) > 1
        shared = shared_memory(session)
        owner.kill()
        owner.wait()
    assert wait_until(lambda: not session_members(session), 60), session_members(session)
    assert wait_until(lambda: not leaked(shared)), leaked(shared)
