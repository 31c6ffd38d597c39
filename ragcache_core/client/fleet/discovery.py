"""Find the replicas of a fleet by a DNS name, and update them when they start and stop."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

from ragcache_core.client.engine import Engine
from ragcache_core.client.fleet.replicas import Replica, ReplicaSet
from ragcache_core.errors import ConfigError, EngineError, EngineUnreachableError, RAGCacheError, quoted
from ragcache_core.log import logger_of

REFRESH_S = 5.0
"""Default seconds between two look-ups of a name."""
_MAX_AT_ONCE = 16
_MAX_MISSED = 3
"""Look-ups without the address of a replica that answers, after which the replica is removed."""
_MAX_RETIRED_S = 900.0
_CLOSE_S = 5.0
_RETRY_S = 0.5
_NAME = re.compile(
    r"dns\+(?P<scheme>https?)://(?P<host>\[[0-9a-fA-F:.]+\]|[^/:@\s]+)(?::(?P<port>[0-9]{1,5}))?/?(?:v1/?)?"
)

logger = logger_of(__name__)


class ServiceName:
    """A DNS name of several servers, such as a headless service of Kubernetes."""

    def __init__(self, url: str, host: str, port: int) -> None:
        self.url = url
        self._host = host
        self._port = port

    @classmethod
    def of(cls, url: str) -> Self:
        """Return the name in ``dns+http://host:port``; the port is 80 if it is left out.

        Raises:
            ConfigError: it is another kind of address, or HTTPS, whose certificates are for names.
        """
        found = _NAME.fullmatch(url)
        if found is None or not 0 < (port := int(found["port"] or 80)) < 65536:
            raise ConfigError(f"urls is {quoted(url)}: give a name with its port, 'dns+http://service:8000'")
        if found["scheme"] == "https":
            raise ConfigError(
                f"urls is {quoted(url)}: a certificate is for a name, and dns+ connects to addresses: give a list of "
                "the replicas' own names, ['https://a:8000', ...]"
            )
        return cls(url, found["host"].strip("[]"), port)

    def __call__(self) -> list[str]:
        """Return the servers' URLs, sorted.

        Raises:
            OSError: the name does not resolve now.
        """
        found = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        hosts = sorted({str(address[0]) for *_, address in found})
        return [f"http://{f'[{host}]' if ':' in host else host}:{self._port}" for host in hosts]

    def __repr__(self) -> str:
        return self.url


class ReplicaFinder:
    """Looks up replicas every ``refresh_s`` seconds in a thread, from :meth:`follow` to :meth:`close`.

    An address joins the fleet when it answers and serves the same model as the others. A replica leaves the fleet when
    look-ups lack its address: at once if it does not answer, otherwise after three look-ups. Its running requests
    finish. No replica leaves while look-ups fail or find no address.
    """

    def __init__(self, source: Callable[[], Sequence[str]], connect: Callable[[str], Engine], refresh_s: float) -> None:
        """Store the settings; the first look-up is in :meth:`first`.

        Args:
            source: returns the addresses as they are now, or raises ``OSError``. Its text names it in warnings.
            connect: returns an engine at an address.
            refresh_s: seconds between two look-ups.
        """
        self._source = source
        self._connect = connect
        self._refresh_s = refresh_s
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._missed: dict[Replica, int] = {}
        self._retired: list[tuple[float, Replica]] = []
        self._reported: dict[str, str] = {}
        self._is_known = True

    def first(self, timeout_s: float | None, served: Callable[[Engine], dict[str, Any]]) -> Engine:
        """Return an engine of the model that most of the answering servers serve.

        Args:
            timeout_s: seconds to wait for one; ``None`` waits without limit.
            served: returns the model of an engine, equal for all replicas.

        Raises:
            EngineUnreachableError: none answers in time.
            EngineError: all servers answer and none can be used, as with a wrong key.
            ConfigError: as many servers serve one model as another.
        """
        ends_s = None if timeout_s is None else time.monotonic() + timeout_s
        is_logged = False
        while True:
            addresses, why = self._look_up()
            engines, errors = self._connect_all(addresses)
            if (first := _most_common(engines, served)) is not None:
                return first
            refused = [error for error in errors.values() if not isinstance(error, EngineUnreachableError)]
            has_timed_out = ends_s is not None and time.monotonic() >= ends_s
            if refused and (has_timed_out or len(refused) == len(addresses)):
                raise refused[0]
            if has_timed_out:
                raise EngineUnreachableError(
                    f"no replica of {self._source} answers: {next(map(str, errors.values()), why)}"
                )
            if not is_logged:
                why = next(map(str, errors.values()), why)
                logger.warning("RC-REPLICA-WAIT: no replica of %s answers yet (%s): waiting for one", self._source, why)
                is_logged = True
            time.sleep(_RETRY_S)

    def follow(self, replicas: ReplicaSet, served: Callable[[Engine], dict[str, Any]]) -> None:
        """Look up the replicas now, then start the thread. ``served`` returns the model of an engine, equal for all."""
        first = replicas.all[0].engine
        expected = served(first)
        self._look(replicas, first.base_url, expected, served)

        def run() -> None:
            while not self._closed.wait(self._refresh_s):
                try:
                    self._look(replicas, first.base_url, expected, served)
                except Exception:
                    logger.exception(
                        "RC-REPLICA-LOOKUP: looking for replicas of %s failed; it is tried again", self._source
                    )

        self._thread = threading.Thread(target=run, name="ragcache-replica-finder", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread, and close the removed replicas. Idempotent."""
        self._closed.set()
        if (thread := self._thread) is not None and thread is not threading.current_thread():
            thread.join(_CLOSE_S)  # a look-up may wait for a name server
        for _, replica in self._retired:
            replica.engine.close()
        self._retired.clear()

    def _look_up(self) -> tuple[Sequence[str], str]:
        try:
            addresses = self._source()
        except OSError as error:
            return (), str(error)
        return addresses, "" if addresses else "it has no addresses"

    def _look(
        self, replicas: ReplicaSet, name: str, expected: dict[str, Any], served: Callable[[Engine], dict[str, Any]]
    ) -> None:
        """Add new replicas, and remove those that are gone."""
        self._close_retired(replicas)
        addresses, why = self._look_up()
        if not addresses:
            if self._is_known:
                logger.warning("RC-REPLICA-NONE: %s finds no replica (%s): the known ones stay", self._source, why)
            self._is_known = False
            return
        self._is_known = True
        known = {replica.name.removesuffix("/v1"): replica for replica in replicas.all}
        self._reported = {address: why for address, why in self._reported.items() if address in addresses}
        engines, errors = self._connect_all([address for address in addresses if address not in known])
        for address, error in errors.items():
            if isinstance(error, EngineUnreachableError):  # as a replica that still loads
                logger.debug("replica %s does not answer yet: %s", address, error)
            else:
                self._report(address, str(error))
        for engine in engines:
            model = served_or_none(engine, served)
            if self._closed.is_set() or not model:  # it is asked again at the next look-up
                engine.close()
            elif differs := difference(name, expected, engine.base_url, model):
                self._report(engine.base_url.removesuffix("/v1"), differs)
                engine.close()
            else:
                replicas.add(engine)
                logger.info("replica %s has joined the fleet", engine.base_url)
        self._remove([replica for address, replica in known.items() if address not in addresses], replicas)

    def _connect_all(self, addresses: Sequence[str]) -> tuple[list[Engine], dict[str, RAGCacheError]]:
        """Return the engines that answer, in the order of their addresses, and the errors of the others."""
        errors: dict[str, RAGCacheError] = {}

        def join(address: str) -> Engine | None:
            try:
                return self._connect(address)
            except RAGCacheError as error:
                errors[address] = error
                return None

        with ThreadPoolExecutor(_MAX_AT_ONCE, "ragcache-replica-finder") as threads:
            return [engine for engine in threads.map(join, addresses) if engine is not None], errors

    def _report(self, address: str, why: str) -> None:
        """Warn once about a server that cannot be used, and again if the reason changes."""
        if self._reported.get(address) != why:
            logger.warning("RC-REPLICA-REJECTED: replica %s is left out of the fleet: %s", address, why)
            self._reported[address] = why

    def _remove(self, missing: Sequence[Replica], replicas: ReplicaSet) -> None:
        self._missed = {replica: self._missed.get(replica, 0) + 1 for replica in missing}
        for replica, num_missed in self._missed.items():
            if num_missed >= _MAX_MISSED or not replica.is_ready():
                replicas.remove(replica)
                self._retired.append((time.monotonic(), replica))
                logger.info("replica %s has left the fleet", replica.name)

    def _close_retired(self, replicas: ReplicaSet) -> None:
        """Close the removed replicas that have answered all of their requests."""
        for retired in list(self._retired):
            since_s, replica = retired
            if replica.load.num_running == 0 or time.monotonic() - since_s > _MAX_RETIRED_S:
                self._retired.remove(retired)
                replicas.forget(replica)
                replica.engine.close()


def _most_common(engines: Sequence[Engine], served: Callable[[Engine], dict[str, Any]]) -> Engine | None:
    """Return an engine of the model that most serve, and close the others; ``None`` if none reports its model.

    Raises:
        ConfigError: two models are served by as many.
    """
    groups: list[tuple[dict[str, Any], list[Engine]]] = []
    for engine in engines:
        if not (model := served_or_none(engine, served)):
            continue
        for known, members in groups:
            if difference("", known, "", model) is None:
                members.append(engine)
                break
        else:
            groups.append((model, [engine]))
    groups.sort(key=lambda group: -len(group[1]))
    is_tie = len(groups) > 1 and len(groups[0][1]) == len(groups[1][1])
    first = groups[0][1][0] if groups and not is_tie else None
    for engine in engines:
        if engine is not first:
            engine.close()
    if is_tie:
        (model, (one, *_)), (other_model, (other, *_)) = groups[:2]
        raise ConfigError(
            f"{difference(one.base_url, model, other.base_url, other_model)}; as many servers have one as the other: "
            "give the name, or a list, of the servers of one model"
        )
    return first


def served_or_none(engine: Engine, served: Callable[[Engine], dict[str, Any]]) -> dict[str, Any]:
    """Return the model identity of an engine; empty if it does not report one now."""
    try:
        return served(engine)
    except EngineError:
        return {}


def difference(name: str, expected: dict[str, Any], other_name: str, other: dict[str, Any]) -> str | None:
    """Return the setting in which two servers differ, so that they are no replicas; ``None`` if they are."""
    for what, value in expected.items():
        if value is not None and other.get(what) is not None and other[what] != value:
            return (
                f"{other_name} has another {what} than {name}, {other[what]!r:.80} and not {value!r:.80}: "
                "the replicas of a fleet serve the same model"
            )
    return None
