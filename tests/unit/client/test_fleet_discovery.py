"""A fleet behind a name: replicas are found, join when they answer, and leave when they are gone."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from ragcache_core.client import Engine, Fleet
from ragcache_core.client.fleet import discovery
from ragcache_core.client.launch.process import free_port
from ragcache_core.errors import ConfigError, EngineAuthError, EngineUnreachableError
from ragcache_core.prompt import PromptLayout, RenderedPrompt
from ragcache_core.types import Document
from tests.conftest import DEMO_MODEL
from tests.support.scripted_server import IDLE, THREE_TIERS, Reply, ScriptedServer
from tests.support.waiting import until

HOSTS = ["127.0.1.1", "127.0.1.2", "127.0.1.3"]
FOURTH = "127.0.1.4"
NAMES = [f"document-{i}" for i in range(24)]


class Service:
    """A name of the test: its addresses, and servers at one port of them."""

    def __init__(self, stack: ExitStack, port: int) -> None:
        self.addresses: list[str] = []
        self.fails = False
        self.num_lookups = 0
        self.url = f"dns+http://replicas.test:{port}"
        self._stack = stack
        self._port = port

    def start(self, host: str, **settings: Any) -> ScriptedServer:
        """Start a server at an address; the name does not tell it yet."""
        given = {"api_key": "key", "root": str(DEMO_MODEL), "cache": dict(THREE_TIERS), "load": IDLE, **settings}
        return self._stack.enter_context(ScriptedServer(host=host, port=self._port, **given))

    def resolve(self, host: str, port: int, **_: object) -> list[tuple[Any, ...]]:
        assert (host, port) == ("replicas.test", self._port)
        self.num_lookups += 1
        if self.fails or not self.addresses:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in self.addresses * 2]


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    with ExitStack() as stack:
        made = Service(stack, free_port("127.0.0.1"))
        resolve = socket.getaddrinfo

        def getaddrinfo(host: str, port: int, *rest: Any, **named: Any) -> Any:
            return made.resolve(host, port) if host == "replicas.test" else resolve(host, port, *rest, **named)

        monkeypatch.setattr("socket.getaddrinfo", getaddrinfo)
        yield made


@pytest.fixture
def fleet(service: Service) -> Iterator[Callable[..., Fleet]]:
    with ExitStack() as stack:

        def join(**settings: Any) -> Fleet:
            given = {"api_key": "key", "refresh_s": 0.05, "restart_timeout_s": 5.0, **settings}
            return stack.enter_context(Fleet.connect(service.url, **given))

        yield join


def prompt(fleet: Fleet, name: str) -> RenderedPrompt:
    return PromptLayout().render(fleet.tokenizer, [Document(name, f"The text of {name} is here.")], "Who?")


def ask_all(fleet: Fleet) -> None:
    for name in NAMES:
        assert fleet.generate(prompt(fleet, name)).text


def hosts(fleet: Fleet) -> list[str]:
    return sorted(engine.base_url.split("/")[2].split(":")[0] for engine in fleet.engines)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_fleet_has_all_replicas_of_a_name_and_takes_more_as_they_come(
    service: Service, fleet: Callable[..., Fleet]
) -> None:
    servers = [service.start(host) for host in HOSTS[:2]]
    service.addresses = HOSTS[:2]
    joined = fleet()
    assert hosts(joined) == HOSTS[:2], "all that answer have joined at the start"
    service.addresses = list(HOSTS)  # the third is named before it answers
    ask_all(joined)
    servers.append(service.start(HOSTS[2]))
    assert until(lambda: hosts(joined) == HOSTS)
    ask_all(joined)
    assert all(server.requests for server in servers)
    assert joined.stats().num_prompt_tokens == sum(engine.stats().num_prompt_tokens for engine in joined.engines)


def test_a_drained_replica_leaves_and_its_answer_is_not_cut(service: Service, fleet: Callable[..., Fleet]) -> None:
    servers = {host: service.start(host) for host in HOSTS[:2]}
    service.addresses = HOSTS[:2]
    joined = fleet()
    for server in servers.values():
        server.rules = [lambda _: Reply("slowly said " * 20, token_wait_s=0.02)]
    stream = joined.stream(prompt(joined, "a"), max_tokens=64)
    next(stream)
    (busy,) = [host for host, server in servers.items() if server.num_running]
    service.addresses = [host for host in HOSTS[:2] if host != busy]
    assert until(lambda: hosts(joined) == service.addresses)
    *_, last = stream
    assert last.stats is not None
    for server in servers.values():
        server.rules = []
    before = len(servers[busy].requests)
    ask_all(joined)
    assert len(servers[busy].requests) == before, "it gets nothing after it has left"


def test_a_dead_replica_leaves_and_comes_back_at_another_address(service: Service, fleet: Callable[..., Fleet]) -> None:
    first, second = service.start(HOSTS[0]), service.start(HOSTS[1])
    service.addresses = HOSTS[:2]
    joined = fleet()
    second.__exit__()
    ask_all(joined)
    third = service.start(HOSTS[2])
    service.addresses = [HOSTS[0], HOSTS[2]]
    assert until(lambda: hosts(joined) == service.addresses)
    ask_all(joined)
    assert first.requests
    assert third.requests


def test_nothing_is_lost_while_the_name_does_not_resolve(
    service: Service, fleet: Callable[..., Fleet], caplog: pytest.LogCaptureFixture
) -> None:
    service.start(HOSTS[0])
    service.addresses = HOSTS[:1]
    joined = fleet(refresh_s=0.02)
    service.fails = True
    failed_from = service.num_lookups
    assert until(lambda: service.num_lookups > failed_from + 4)
    ask_all(joined)
    assert hosts(joined) == HOSTS[:1]
    (_one_line,) = [line for line in warnings(caplog) if "finds no replica" in line]


def test_a_fleet_begins_when_the_first_replica_answers(
    service: Service, fleet: Callable[..., Fleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = 0

    def sleep(_: float) -> None:
        nonlocal looked
        looked += 1
        if looked == 2:
            service.addresses = HOSTS[:1]
        if looked == 4:
            service.start(HOSTS[0])

    monkeypatch.setattr("ragcache_core.client.fleet.discovery.time.sleep", sleep)
    joined = fleet(restart_timeout_s=60.0)
    assert looked == 4
    ask_all(joined)


@pytest.mark.parametrize("is_named", [False, True])
def test_without_any_replica_the_error_reports_where_was_looked(
    service: Service, fleet: Callable[..., Fleet], *, is_named: bool
) -> None:
    service.addresses = HOSTS[:1] if is_named else []
    why = rf"no engine answers at http://{HOSTS[0]}" if is_named else "Name or service not known"
    with pytest.raises(EngineUnreachableError, match=rf"no replica of dns\+http://replicas.test:\d+ answers: .*{why}"):
        fleet(restart_timeout_s=0.0)


@pytest.mark.parametrize("place", [0, 1, 3])
def test_a_replica_of_another_model_is_left_out_with_one_line_wherever_it_is(
    service: Service, fleet: Callable[..., Fleet], caplog: pytest.LogCaptureFixture, place: int
) -> None:
    addresses = [*HOSTS, FOURTH]
    odd, locked_host = addresses.pop(place), addresses.pop(0)
    other = service.start(odd, model="another-model")
    locked = service.start(locked_host, api_key="another-key")
    for host in addresses:
        service.start(host)
    service.addresses = [*HOSTS, FOURTH]
    joined = fleet(refresh_s=0.02)
    assert hosts(joined) == addresses
    ask_all(joined)
    said = [line for line in warnings(caplog) if "left out" in line]
    assert until(lambda: len(other.cache_questions) > 6), "it is looked at again"
    assert len(said) == 2, said
    assert any("another model" in line and odd in line for line in said)
    assert any("key" in line and locked_host in line for line in said)
    assert not other.requests
    assert not locked.requests


def test_as_many_servers_of_one_model_as_of_another_are_refused(service: Service, fleet: Callable[..., Fleet]) -> None:
    service.start(HOSTS[0])
    service.start(HOSTS[1], model="another-model")
    service.addresses = HOSTS[:2]
    with pytest.raises(ConfigError, match="another model"):
        fleet()


def test_a_replica_whose_model_is_not_known_yet_joins_when_it_is(
    service: Service, fleet: Callable[..., Fleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = [service.start(HOSTS[0]), service.start(HOSTS[1]), service.start(HOSTS[2], model="another-model")]
    service.addresses = list(HOSTS)
    read, failed = discovery.served_or_none, set()

    def fail_at_first(engine: Engine, served: Any) -> dict[str, Any]:
        if len(failed) < 9 and engine.base_url not in failed:
            failed.add(engine.base_url)
            return {}
        return read(engine, served)

    monkeypatch.setattr(discovery, "served_or_none", fail_at_first)
    joined = fleet(refresh_s=0.02)
    assert until(lambda: hosts(joined) == HOSTS[:2])
    ask_all(joined)
    assert not servers[2].requests


def test_a_server_that_refuses_does_not_keep_the_others_out(service: Service, fleet: Callable[..., Fleet]) -> None:
    service.start(HOSTS[0], api_key="another-key")
    service.start(HOSTS[1])
    service.addresses = list(HOSTS)  # nothing answers at the third
    assert hosts(fleet()) == HOSTS[1:2]


def test_a_wrong_key_is_rejected_at_the_entry(service: Service, fleet: Callable[..., Fleet]) -> None:
    service.start(HOSTS[0])
    service.addresses = HOSTS[:1]
    with pytest.raises(EngineAuthError):
        fleet(api_key="wrong")


def test_a_list_that_is_looked_at_again_takes_replicas_that_answer_later(service: Service) -> None:
    service.start(HOSTS[0])
    port = service.url.rpartition(":")[2]
    urls = [f"http://{host}:{port}/v1" for host in HOSTS[:2]]
    with pytest.raises(EngineUnreachableError):
        Fleet.connect(urls, api_key="key")
    with Fleet.connect(urls, api_key="key", refresh_s=0.05) as joined:
        assert hosts(joined) == HOSTS[:1]
        service.start(HOSTS[1])
        assert until(lambda: hosts(joined) == HOSTS[:2])


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("dns+https://service:8000", "certificate"),
        ("dns+http://", "with its port"),
        ("dns+http://service:99999", "with its port"),
        ("dns+ftp://service:8000", "with its port"),
        ("dns+http://user:secret@service:8000", "with its port"),
        ("http://service:8000", r"dns\+http"),
    ],
)
def test_an_address_that_is_no_name_of_replicas_is_refused(url: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Fleet.connect(url)


@pytest.mark.parametrize("refresh_s", [0, -1, float("nan")])
def test_a_pause_that_cannot_work_is_refused(refresh_s: float) -> None:
    with pytest.raises(ConfigError, match="refresh_s"):
        Fleet.connect("dns+http://service:8000", refresh_s=refresh_s)
