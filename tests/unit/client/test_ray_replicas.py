"""Which replica on Ray Serve gets a request, whatever becomes of it, and what is refused before any starts."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ragcache_core import CacheConfig, ConfigError, ragcache_deployment
from ragcache_core.client.launch.settings import VLLMOffload
from ragcache_core.client.ray_serve.deployment import build, own_settings
from ragcache_core.client.ray_serve.known_replicas import ReplicaRequest, ReplicaStates
from ragcache_core.ordering import CachedPaths, PathChange
from ragcache_core.routing.index import PathIndex
from ragcache_core.routing.load import PromptInfo
from ragcache_core.runtime.api_keys import hashed
from tests.support.waiting import until

NAMES = ["one", "two", "three"]
PREFIX = b"prefix"


class Mirror:
    """What a server says that it has, of each address."""

    said: dict[str, CachedPaths] = {}
    closed: list[str] = []

    def __init__(self, url: str, api_key: str) -> None:
        assert api_key == "key"
        self._url = url

    def keep_in(self, index: PathIndex, lock: threading.Lock) -> None:
        assert not lock.locked()

    def known_in(self, index: PathIndex) -> Sequence[CachedPaths]:
        paths = self.said.setdefault(self._url, CachedPaths())
        if not paths.bit:
            deque(index.join(paths), 0)
        return [paths]

    def close(self) -> None:
        self.closed.append(self._url)


def told(*names: str, **serves: Any) -> dict[str, dict[str, Any]]:
    return {name: {"url": f"http://{name}/v1", "api_key": "key", "serves": {"model": "m", **serves}} for name in names}


@pytest.fixture
def known() -> ReplicaStates:
    Mirror.said, Mirror.closed = {}, []
    replicas = ReplicaStates(cast("Any", Mirror))
    replicas.update(told(*NAMES))
    return replicas


def new_request(document: str = "a", **more: Any) -> ReplicaRequest:
    return ReplicaRequest(
        "POST", "/v1/completions", [], b"", PromptInfo((document,), (120,), 20, 130, PREFIX, document), **more
    )


def idlest(known: ReplicaStates) -> list[str]:
    """Return the replicas, those first that have the least to do."""
    return known.choose(NAMES, ReplicaRequest("GET", "/health", [], b""))


@pytest.mark.parametrize("name", NAMES)
def test_a_request_goes_where_its_documents_are_cached(known: ReplicaStates, name: str) -> None:
    paths = CachedPaths()
    paths.set(PathChange(PREFIX, (), 20))
    paths.set(PathChange(PREFIX, ("a",), 120))
    Mirror.said[f"http://{name}/v1"] = paths
    chosen, *others = known.choose(NAMES, new_request())
    assert chosen == name
    assert set(others) == set(NAMES) - {name}, "they may get it if that one is full"


@pytest.mark.parametrize("how", ["answered", "given up", "moved", "never sent"])
def test_however_a_request_ends_it_counts_nowhere_afterwards(known: ReplicaStates, how: str) -> None:
    ask = new_request()
    home = known.choose(NAMES, ask)[0]
    assert idlest(known)[0] != home
    if how == "answered":
        ask.answered()
    elif how == "moved":
        other = next(name for name in NAMES if name != home)
        known.sent(other, ask)
        assert ask.sent_to == other
        assert idlest(known)[0] in set(NAMES) - {other}
    ask.end()
    ask.end()
    if how == "given up":  # while Serve still chose
        known.choose(NAMES, ask)
    for name in NAMES:
        if name != home:
            known.choose([name], new_request())  # with something to do
    assert idlest(known)[0] == home


def test_a_request_cancelled_while_rescheduled_counts_once_and_ends_once(known: ReplicaStates) -> None:
    ask = new_request()
    home = known.choose(NAMES, ask)[0]
    ask.end()
    for _ in range(3):
        known.choose([home], ask)
    known.choose([home], new_request())
    assert idlest(known)[0] != home


def test_a_replica_that_failed_is_left_alone_while_others_are_there(known: ReplicaStates) -> None:
    ask = new_request()
    home = known.choose(NAMES, ask)[0]
    ask.failed()
    ask.end()
    assert home not in known.choose(NAMES, ask.again())
    assert home not in known.choose(NAMES, new_request()), "nor is it asked by others, for a while"
    assert known.choose([home], new_request()) == [home], "where there is no other one"
    last = ask.again()
    for _ in NAMES:
        known.choose(NAMES, last)
        last = last.again()
    assert known.choose(NAMES, last), "one is asked even where all have failed"


def test_a_request_goes_to_its_only_replica_and_to_any_once_that_is_gone(known: ReplicaStates) -> None:
    for name in NAMES:
        assert known.choose(NAMES, ReplicaRequest("POST", "/", [], b"", replica=name)) == [name]
    assert known.choose(NAMES, ReplicaRequest("POST", "/", [], b"", replica="gone"))


@pytest.mark.parametrize("order", list(permutations(NAMES)), ids=" ".join)
def test_a_replica_of_another_model_is_asked_nothing_while_an_older_one_runs(
    order: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    known = ReplicaStates(cast("Any", Mirror))
    first, second, third = order
    known.update(told(first, second))
    now = told(first, second) | told(third, model="another")
    known.update(now)
    (said,) = [record.message for record in caplog.records]
    assert f"the replica at http://{third}/v1 has another model" in said
    assert "'another' and not 'm'" in said
    assert third not in known.choose(NAMES, new_request())
    assert known.choose([third], new_request()) == []
    known.update({third: now[third]})  # as after an update of the application
    assert known.choose([third], new_request()) == [third]


def test_replicas_that_are_gone_are_followed_no_more(known: ReplicaStates) -> None:
    known.update(told("two", "four"))
    assert until(lambda: sorted(Mirror.closed) == ["http://one/v1", "http://three/v1"])
    assert set(known.choose(["two", "four"], new_request())) == {"two", "four"}


async def test_serves_router_asks_the_best_replica_first_and_notes_who_got_it() -> None:
    pytest.importorskip("ray.serve", reason="ray[serve] is not installed")
    from ray.serve.request_router import PendingRequest

    from ragcache_core.client.ray_serve import router as module

    router = module.DocumentRouter.__new__(module.DocumentRouter)  # its base wants a cluster
    router.initialize_state()
    router._known = known = ReplicaStates(cast("Any", Mirror))
    known.update(told(*NAMES))
    replicas: list[Any] = [SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in NAMES]
    ask = new_request()
    pending = PendingRequest(args=[ask], kwargs={}, metadata=cast("Any", None))
    (best,), others = await router.choose_replicas(replicas, pending)
    assert best.replica_id.unique_id == ask.sent_to
    assert [best, *others] != replicas or ask.sent_to == NAMES[0]
    assert {each.replica_id.unique_id for each in (best, *others)} == set(NAMES)
    router.on_request_routed(pending, others[0].replica_id, None)
    assert ask.sent_to == others[0].replica_id.unique_id
    assert await router.choose_replicas(replicas, None) == [replicas]


def test_each_replica_of_a_machine_has_a_disk_and_a_log_of_its_own(tmp_path: Path) -> None:
    for cache in (
        CacheConfig(host_bytes="1GiB", disk_bytes="1GiB", directory=tmp_path),
        VLLMOffload(1 << 30, directory=tmp_path),
    ):
        for rank in range(2):
            own = own_settings({"cache": cache, "log_path": str(tmp_path / "server.log"), "max_model_len": 64}, rank)
            assert own["cache"].directory == tmp_path / f"replica-{rank}"
            assert own["log_path"] == tmp_path / f"server-replica-{rank}.log"
            assert own["max_model_len"] == 64
    without = CacheConfig(host_bytes="1GiB")
    assert own_settings({"cache": without}, 1) == {"cache": without, "log_path": None}
    assert own_settings({"cache": None}, 1)["cache"] is None


@pytest.mark.parametrize(
    "settings",
    [
        {"num_replicas": 0},
        {"num_replicas": 1.5},
        {"num_replicas": "auto", "autoscaling_config": {"max_replicas": 4}},
        {"data_parallel_size": 2},
        {"replica_options": {"num_replicas": 2}},
        {"replica_options": {"request_router_config": {}}},
        {"front_options": {"name": "mine"}},
        {"api_key": ""},
        {"port": 8000, "max_restarts": 3},
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAGCACHE_API_KEY", raising=False)
    with pytest.raises(ConfigError):
        ragcache_deployment("model", **{"api_key": "key", **settings})


def test_a_file_of_serves_has_the_same_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray.serve", reason="ray[serve] is not installed")
    monkeypatch.setenv("RAGCACHE_API_KEY", "key")
    cache = {"kv_cache_bytes": "32MiB", "host_bytes": "1GiB"}
    args = {"model": "m", "autoscaling_config": {"max_replicas": 4}, "cache": cache, "max_model_len": 2048}
    application = build(args)
    replicas = application._bound_deployment.init_args[0]._bound_deployment
    model, settings = replicas.init_args
    assert (model, settings["max_model_len"], settings["api_key"]) == ("m", 2048, "key")
    assert settings["cache"] == CacheConfig(**cache)
    router = replicas._deployment_config.request_router_config
    assert router.request_router_class.endswith("DocumentRouter")
    assert not router.request_router_kwargs, "they are on Ray's dashboard, where the key must not be"
    with pytest.raises(ConfigError, match="host_bytes"):
        build({**args, "cache": {"host_bytes": "many"}})


def test_replicas_may_follow_the_load_as_serve_has_it() -> None:
    pytest.importorskip("ray.serve", reason="ray[serve] is not installed")
    application = ragcache_deployment("m", api_key="key", num_replicas="auto", front_options={"num_replicas": 2})
    front = application._bound_deployment
    replicas = front.init_args[0]._bound_deployment
    assert replicas._deployment_config.autoscaling_config is not None
    assert replicas._deployment_config.max_ongoing_requests == 1000
    assert front.num_replicas == 2


def test_the_ingress_accepts_the_keys_of_its_engines(tmp_path: Path) -> None:
    pytest.importorskip("ray.serve", reason="ray[serve] is not installed")
    file = tmp_path / "tenants.toml"
    secret, key, operators = "s" * 32, "t" * 16, "o" * 16
    file.write_text(
        f'secret = "{secret}"\n[operators]\nkeys = ["{operators}"]\n[[tenants]]\nname = "a"\nkeys = ["{key}"]\n'
    )

    def keys(cache: CacheConfig) -> list[bytes]:
        _, _, known = ragcache_deployment("m", api_key="key", cache=cache)._bound_deployment.init_args
        return list(known)

    assert keys(CacheConfig()) == [hashed("key")]
    assert keys(CacheConfig(tenants=file)) == [hashed("key"), hashed(operators), hashed(key)]
    with pytest.raises(ConfigError, match="cannot be read"):
        keys(CacheConfig(tenants=tmp_path / "none.toml"))


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'ragcache\[ray\]'"):
        ragcache_deployment("model", api_key="key")
