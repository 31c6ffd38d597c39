"""What a launch decides before its server starts, and what is not decided again when the server is started again."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ragcache_core.client.launch import arguments as setting_names
from ragcache_core.client.launch import process
from ragcache_core.client.launch.arguments import check_context
from ragcache_core.client.launch.launch import DirectoryLock, launch_digest, launch_server
from ragcache_core.client.launch.settings import LaunchSettings
from ragcache_core.config import CacheConfig, ChunkReuse
from ragcache_core.errors import ConfigError, EngineStartError
from ragcache_core.memory import Memory
from ragcache_core.runtime import shared_memory
from ragcache_core.runtime.shared_memory import new_engine_id
from tests.support.shared_stores import redis_server

GIB = 1 << 30


class Owner:
    """A machine on which servers are started, and what each start was given; ``again`` starts the last one again,
    ``end`` ends it."""

    def __init__(self, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.memory = Memory(64 * GIB, 8 * GIB)
        self.arguments: list[list[str]] = []
        self.environments: list[dict[str, str]] = []
        self.failure: EngineStartError | None = None
        self.ends: list[Callable[[], object]] = []
        self.again: Callable[[], object] = lambda: None
        self.end: Callable[[], object] = lambda: None
        self._model = model
        for name, replacement in {
            "ragcache_core.config.read_memory": lambda: self.memory,
            "ragcache_core.config.has_gpu": lambda: True,
            "ragcache_core.client.launch.launch.ServerProcess": self._start,
            "ragcache_core.client.launch.launch.Supervisor": self._supervise,
        }.items():
            monkeypatch.setattr(name, replacement)

    def launch(
        self,
        cache: CacheConfig,
        *,
        env: dict[str, str] | None = None,
        extra_args: Sequence[str] = (),
        tokenizer: str | None = None,
        **vllm_args: object,
    ) -> None:
        settings = {"cache": cache, "tokenizer": tokenizer, "env": env, "extra_args": extra_args, **vllm_args}
        launch_server(LaunchSettings.of(self._model, {"log_path": "log", "hang_timeout_s": None, **settings}))

    @property
    def extra_config(self) -> dict[str, Any]:
        arguments = self.arguments[-1]
        config = json.loads(arguments[arguments.index("--kv-transfer-config") + 1])
        extra: dict[str, Any] = config["kv_connector_extra_config"]
        return extra

    def _start(self, arguments: list[str], *, env: dict[str, str], log_path: Path, log_as_json: bool) -> None:
        self.arguments.append(arguments)
        self.environments.append(env)

    def _supervise(self, start: Callable[[], object], *_: object, **settings: Any) -> SimpleNamespace:
        start()
        self.again, self.end = start, settings["on_end"]
        self.ends.append(self.end)
        if self.failure is not None:
            raise self.failure
        return SimpleNamespace()


@pytest.fixture
def owner(demo_model: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Owner]:
    owner = Owner(demo_model, monkeypatch)
    yield owner
    for end in owner.ends:
        end()


def test_host_memory_that_is_not_free_is_refused_at_the_launch_and_starts_nothing(owner: Owner) -> None:
    with pytest.raises(ConfigError, match=r"host_bytes is 9\.0GiB, .* 8\.0GiB of it free"):
        owner.launch(CacheConfig(host_bytes="9GiB"))
    assert owner.arguments == []


def test_a_server_that_is_started_again_keeps_what_it_was_given_whatever_is_free_by_then(owner: Owner) -> None:
    owner.launch(CacheConfig(host_bytes="8GiB"))
    owner.memory = Memory(64 * GIB, 0)  # its region is still there
    owner.again()
    assert owner.arguments[0] == owner.arguments[1]
    assert owner.extra_config["cpu_bytes_to_use"] == 8 * GIB


def test_a_second_engine_on_one_directory_starts_nothing_until_the_first_has_ended(
    owner: Owner, tmp_path: Path
) -> None:
    cache = CacheConfig(host_bytes="1GiB", disk_bytes="1GiB", directory=tmp_path)
    owner.launch(cache)
    end_first = owner.end
    with pytest.raises(EngineStartError, match=f"{tmp_path} is the cache directory of another engine .* stop that one"):
        owner.launch(CacheConfig(host_bytes="2GiB", disk_bytes="1GiB", directory=tmp_path, policy="lru"))
    assert len(owner.arguments) == 1
    end_first()
    owner.launch(cache)
    assert len(owner.arguments) == 2


def test_engines_that_may_keep_different_kv_share_a_directory(owner: Owner, tmp_path: Path) -> None:
    cache = CacheConfig(host_bytes="1GiB", disk_bytes="1GiB", directory=tmp_path)
    owner.launch(cache)
    owner.launch(cache, dtype="bfloat16")
    owner.launch(cache, max_model_len=512)
    owner.launch(CacheConfig(host_bytes="1GiB", disk_bytes="1GiB", directory=tmp_path, block_size=64))
    owner.launch(CacheConfig(host_bytes="1GiB"))
    assert len(owner.arguments) == 5


def test_changed_weights_are_another_launch(demo_model: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(demo_model, model)
    before = launch_digest(str(model), CacheConfig(), [], {})
    assert launch_digest(str(model), CacheConfig(), [], {"VLLM_API_KEY": "k", "PATH": "/bin"}) == before
    assert launch_digest(str(model), CacheConfig(), [], {"VLLM_PP_LAYER_PARTITION": "1,2"}) != before
    os.utime(next(model.glob("*.safetensors")), ns=(1, 1))
    assert launch_digest(str(model), CacheConfig(), [], {}) != before


def test_a_fork_of_the_owner_does_not_keep_its_lock(tmp_path: Path) -> None:
    lock = DirectoryLock(tmp_path, "launch")
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def live_on() -> None:
        theirs.send("forked")
        theirs.recv()

    child = context.Process(target=live_on)
    child.start()
    try:
        assert ours.recv() == "forked"
        os.close(lock._descriptor)  # as the death of the owner would
        DirectoryLock(tmp_path, "launch").release()
    finally:
        child.kill()
        child.join()


def test_without_vllm_a_launch_reports_how_to_install_it(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ragcache_core.client.launch.arguments.find_spec", lambda name: None)
    with pytest.raises(EngineStartError, match=r"vLLM is not installed here.*ragcache\[gpu\].*make setup.*elsewhere"):
        owner.launch(CacheConfig())
    assert owner.arguments == []


@pytest.mark.parametrize(
    ("settings", "meant"),
    [
        ({"max_model_length": 2048}, "max_model_len"),
        ({"startup_timeout": 5}, "startup_timeout_s"),
        ({"host_bytes": "1GiB"}, "cache=CacheConfig(host_bytes=...)"),
        ({"cache_dir": "/kv"}, "cache=CacheConfig(directory=...)"),
        ({"extra_args": ["--disk-bite", "1GiB"]}, "--disk-bytes"),
        ({"extra_args": ["--max_model_length=2048"]}, "--max-model-len"),
        ({"zorval": 1}, "zorval"),
    ],
)
def test_a_misspelt_setting_is_refused_with_the_nearest_name_and_starts_nothing(
    owner: Owner, settings: dict[str, Any], meant: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        owner.launch(CacheConfig(), **settings)
    assert meant in str(refused.value)
    assert owner.arguments == []


def test_settings_in_every_form_that_vllm_reads_are_passed_on(owner: Owner) -> None:
    raw = ["--dtype=float32", "--max_num_seqs", "4", "--compilation-config.mode=0", "-O0", "--no-enable-log-requests"]
    owner.launch(CacheConfig(), extra_args=raw, enforce_eager=True, enable_log_deltas=False, max_model=2048)
    assert owner.arguments[0][-len(raw) :] == raw
    for argument in ("--enforce-eager", "--no-enable-log-deltas", "--max-model"):  # the last is an abbreviation
        assert argument in owner.arguments[0]


def test_no_name_is_refused_where_a_platform_may_add_arguments(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    entry_points = "ragcache_core.client.launch.arguments.entry_points"
    monkeypatch.setattr(entry_points, lambda group: [SimpleNamespace(name="its-platform")])
    setting_names._known_names.cache_clear()
    try:
        owner.launch(CacheConfig(), of_its_platform=1)
    finally:
        setting_names._known_names.cache_clear()
    assert "--of-its-platform" in owner.arguments[0]


@pytest.mark.parametrize(
    ("settings", "is_optional"), [({}, True), ({"host_bytes": "1GiB"}, False), ({"disk_bytes": "1GiB"}, False)]
)
def test_an_engine_may_go_without_host_memory_only_if_unset_and_unneeded(
    owner: Owner, tmp_path: Path, settings: dict[str, object], is_optional: bool
) -> None:
    directory = {"directory": tmp_path} if "disk_bytes" in settings else {}
    owner.launch(CacheConfig(**settings, **directory))
    assert owner.extra_config["cpu_bytes_to_use"] == GIB
    assert owner.extra_config["is_host_optional"] is is_optional
    assert owner.extra_config["most_host_bytes"] == (None if "host_bytes" in settings else 4 * GIB)


def test_what_is_reused_anywhere_keeps_its_share_of_host_memory_that_may_grow(owner: Owner) -> None:
    owner.launch(CacheConfig(chunk_reuse=ChunkReuse(share=0.25)))
    assert owner.extra_config["cpu_bytes_to_use"] == 3 * GIB // 4
    assert owner.extra_config["most_host_bytes"] == 4 * GIB - GIB // 4


@pytest.mark.parametrize(
    "settings",
    [
        {"data_parallel_size": 2},
        {"extra_args": ["-dp", "2"]},
        {"data_parallel_size": 8, "data_parallel_size_local": 2},
        {"extra_args": ["--data_parallel_size=4", "-dpl=2"]},
    ],
)
def test_the_replicas_of_an_engine_share_host_memory_and_disk(
    owner: Owner, tmp_path: Path, settings: dict[str, Any]
) -> None:
    owner.launch(CacheConfig(host_bytes="1GiB", disk_bytes="6GiB", directory=tmp_path), **settings)
    engine_id = owner.environments[0]["RAGCACHE_ENGINE_ID"]
    found = sorted(Path("/dev/shm").glob(f"*{engine_id}*.mmap"))
    assert [path.name for path in found] == [f"vllm_offload_{engine_id}_dp{i}.mmap" for i in range(2)]
    assert [path.stat().st_size for path in found] == [GIB // 2] * 2
    assert owner.extra_config["cpu_bytes_to_use"] == GIB // 2
    assert owner.extra_config["secondary_tiers"][0]["capacity_bytes"] == 3 * GIB
    owner.end()
    assert list(Path("/dev/shm").glob(f"*{engine_id}*")) == []


@pytest.mark.slow
def test_a_shared_store_that_refuses_us_starts_nothing_and_one_that_does_not_answer_is_warned_of(
    owner: Owner, caplog: pytest.LogCaptureFixture
) -> None:
    with redis_server("--requirepass", "right") as server:
        with pytest.raises(ConfigError, match="set RAGCACHE_SHARED_PASSWORD to its password"):
            owner.launch(CacheConfig(host_bytes="1GiB", shared=server.url))
        assert owner.environments == []
        owner.launch(CacheConfig(host_bytes="1GiB", shared=server.url), env={"RAGCACHE_SHARED_PASSWORD": "right"})
    owner.launch(CacheConfig(host_bytes="1GiB", shared=server.url))
    assert len(owner.environments) == 2
    assert "RC-SHARED-UNREACHABLE" in caplog.text


def test_host_memory_that_may_grow_is_shared_by_replicas_as_well(owner: Owner) -> None:
    owner.launch(CacheConfig(), data_parallel_size=2)
    assert owner.extra_config["cpu_bytes_to_use"] == GIB // 2
    assert owner.extra_config["most_host_bytes"] == 2 * GIB


def test_an_engines_sockets_are_in_a_private_folder_unless_another_is_configured(owner: Owner) -> None:
    owner.launch(CacheConfig(host_bytes="1GiB"))
    sockets = Path(owner.environments[0]["VLLM_RPC_BASE_PATH"])
    (sockets / "0c7f").touch()
    owner.again()
    assert list(sockets.iterdir()) == []
    owner.end()
    assert not sockets.exists()
    owner.launch(CacheConfig(host_bytes="1GiB"), env={"VLLM_RPC_BASE_PATH": "/tmp/mine"})
    assert owner.environments[-1]["VLLM_RPC_BASE_PATH"] == "/tmp/mine"
    owner.end()


def test_memory_of_an_engine_with_a_dead_owner_is_freed_before_memory_is_counted(
    owner: Owner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as dead:
        left = tmp_path / f"vllm_offload_{new_engine_id(dead.pid)}.mmap"
        dead.communicate()
    ours = tmp_path / f"vllm_offload_{new_engine_id(os.getpid())}.mmap"
    left.touch()
    ours.touch()
    monkeypatch.setattr(
        "ragcache_core.client.launch.launch.sweep_shared_memory",
        lambda: shared_memory.sweep_shared_memory(folder=tmp_path),
    )
    monkeypatch.setattr("ragcache_core.config.read_memory", lambda: Memory(64 * GIB, (2 - left.exists()) * GIB))
    owner.launch(CacheConfig(host_bytes="2GiB"))
    assert (left.exists(), ours.exists()) == (False, True)


@pytest.mark.parametrize("ends", [True, False])
def test_an_engine_that_is_about_to_end_is_waited_for_before_its_memory_is_missed(
    owner: Owner, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    """Its owner was killed, and it has not noticed yet."""
    looks = 0

    def read() -> Memory:
        nonlocal looks
        looks += 1
        return Memory(64 * GIB, 2 * GIB if ends and looks > 4 else GIB)

    monkeypatch.setattr("ragcache_core.config.read_memory", read)
    monkeypatch.setattr("ragcache_core.client.launch.launch._HEALTH_CHECK_INTERVAL_S", 0.01)
    monkeypatch.setattr("ragcache_core.client.launch.launch._SHUTDOWN_TIMEOUT_S", 30.0 if ends else 0.1)
    monkeypatch.setattr("ragcache_core.client.launch.launch.sweep_shared_memory", lambda: [Path("left")])
    if ends:
        owner.launch(CacheConfig(host_bytes="2GiB"))
    else:
        with pytest.raises(ConfigError, match=r"host_bytes is 2\.0GiB"):
            owner.launch(CacheConfig(host_bytes="2GiB"))
    assert looks > 4


def test_blocks_that_attention_without_a_gpu_does_not_take_start_nothing(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragcache_core.client.launch.arguments.has_gpu", lambda: False)
    with pytest.raises(ConfigError, match=r"block_size is 33: .* multiples of 32, so set block_size to 32"):
        owner.launch(CacheConfig(block_size=33))
    assert owner.arguments == []
    owner.launch(CacheConfig(block_size=64))
    monkeypatch.setattr("ragcache_core.client.launch.arguments.has_gpu", lambda: True)
    owner.launch(CacheConfig(block_size=16))
    assert len(owner.arguments) == 2


@pytest.mark.parametrize("tokenizer", ["{}/nowhere", "./nowhere", "~/nowhere", "../a/b/c"])
def test_a_tokenizer_that_is_not_there_starts_nothing(owner: Owner, tmp_path: Path, tokenizer: str) -> None:
    folder = tokenizer.format(tmp_path)
    with pytest.raises(EngineStartError, match=f"there is no tokenizer at '{folder}': name a folder"):
        owner.launch(CacheConfig(), tokenizer=folder)
    assert owner.arguments == []


def too_long(model: str, **settings: Any) -> bool:
    """Return whether a context of 5,000 tokens is refused before anything is started."""
    try:
        check_context(model, [*settings.get("arguments", ()), "--max-model-len", "5000"], settings.get("env", {}))
    except ConfigError:
        return True
    return False


def test_a_longer_context_than_the_model_has_starts_nothing(owner: Owner, demo_model: str) -> None:
    for given in ({"max_model_len": 5000}, {"extra_args": ["--max_model_len=5000"]}):
        with pytest.raises(ConfigError, match=r"max_model_len is 5000, .* 4096 tokens .*: lower max_model_len"):
            owner.launch(CacheConfig(), **given)
    assert owner.arguments == []
    assert too_long(demo_model)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        {"model_max_length": 8192},
        {"text_config": {"max_position_embeddings": 8192}},
        {"max_position_embeddings": None},
        {"max_position_embeddings": "many"},
        [],
    ],
    ids=repr,
)
def test_a_context_is_left_to_the_server_where_the_model_leaves_a_doubt(
    demo_model: str, tmp_path: Path, changes: dict[str, object]
) -> None:
    config = json.loads((Path(demo_model) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes} if changes else changes))
    assert not too_long(str(tmp_path))


def test_a_context_is_left_to_the_server_where_the_user_knows_better(demo_model: str) -> None:
    assert not too_long(demo_model, env={"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"})
    assert not too_long(demo_model, arguments=["--hf-overrides", '{"max_position_embeddings": 8192}'])
    assert not too_long("org/name")


@pytest.mark.parametrize(
    "said",
    [
        "huggingface_hub.errors.LocalEntryNotFoundError: Cannot find an appropriate cached snapshot folder",
        "OSError: We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find them cached",
        "OSError: no-such/model is not a local folder and is not a valid model identifier listed on the hub",
    ],
)
def test_a_name_that_the_hub_does_not_have_is_named_with_what_to_do(owner: Owner, said: str) -> None:
    owner._model = "no-such/model"
    owner.failure = EngineStartError(f"the engine ended with exit status 1 before it was ready: {said}")
    with pytest.raises(EngineStartError) as refused:
        owner.launch(CacheConfig(host_bytes="1GiB"), dtype="float32")
    message = str(refused.value)
    assert message.startswith("model 'no-such/model' was not found: ")
    assert "hf download no-such/model" in message
    assert said not in message


def test_a_full_disk_at_the_start_is_named_with_its_folder(
    owner: Owner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "OSError: [Errno 28] No space left on device"
    owner.failure = EngineStartError(f"the engine ended with exit status 1 before it was ready: {said}")
    folder = tmp_path / "compiled" / "vllm"
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=3 << 20))
    with pytest.raises(EngineStartError, match=f"no space is left .*VLLM_CACHE_ROOT={folder} .3 MiB free"):
        owner.launch(CacheConfig(host_bytes="1GiB"), env={"VLLM_CACHE_ROOT": str(folder)})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 40))
    with pytest.raises(EngineStartError, match="Errno 28"):  # another disk, which the engine's error names
        owner.launch(CacheConfig(host_bytes="1GiB"), env={"VLLM_CACHE_ROOT": str(folder)})


def test_a_free_port_is_below_those_of_connections_unless_all_there_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert {process.free_port("127.0.0.1") < first for _ in range(20)} == {True}
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", process.free_port("127.0.0.1")))
        taken.listen()
        monkeypatch.setattr(process, "_FIRST_PORT", taken.getsockname()[1])
        monkeypatch.setattr(process, "_NUM_PORTS", 1)
        assert process.free_port("127.0.0.1") >= first
