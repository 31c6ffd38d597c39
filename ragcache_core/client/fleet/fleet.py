"""A fleet: several servers of one model, used like one engine; requests go to the replica with their documents."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from functools import reduce
from typing import Any, Literal, NoReturn, Self, TypeVar, cast

from pydantic import TypeAdapter

from ragcache_core.client.cache import CacheRoutes, PrefetchRoute
from ragcache_core.client.engine import Engine, check_tokenizer
from ragcache_core.client.engine_client import EngineClient
from ragcache_core.client.fleet.discovery import REFRESH_S, ReplicaFinder, ServiceName, difference
from ragcache_core.client.fleet.replicas import HOME, FleetPrefixes, Replica, ReplicaSet
from ragcache_core.client.http.attempt import AUTO, FirstTokenTimeout, RetryPolicy, check_seconds
from ragcache_core.client.http.remote_server import HANG_TIMEOUT_S, RESTART_TIMEOUT_S
from ragcache_core.client.http.resume import ResumeStreams
from ragcache_core.client.launch.process import GRACE_S
from ragcache_core.client.server_api import ServerAPI
from ragcache_core.errors import ConfigError, EngineError, EngineUnreachableError
from ragcache_core.log import logger_of
from ragcache_core.runtime.api_keys import check_api_key
from ragcache_core.stats import EngineStats, ForgetReceipt, RegistrationReceipt, merged_report
from ragcache_core.types import DocId, Document

_NO_KEY = "none"
_MAX_FOUND = 64
"""Replicas that a request tries where it is not known how many there will be."""
_Answer = TypeVar("_Answer")
_STATS = TypeAdapter(EngineStats)
logger = logger_of(__name__)


def served_model_identity(engine: Engine) -> dict[str, str | int | None]:
    """Return the settings that must be equal in all replicas, by name."""
    offered = engine.tokenizer.identity
    cache = "plain vLLM" if engine.stats().policy is None else "RAGCache"
    return {"model": engine.model, "max_model_len": engine.max_model_len, "tokenizer": offered, "cache": cache}


class Fleet(EngineClient):
    """Replicas of one server, with the methods of an :class:`~ragcache_core.client.engine.Engine`.

    ::

        with Fleet.connect(["http://a:8000", "http://b:8000"], api_key=...) as fleet:
            llm = ChatRAGCache(engine=fleet)

    A request goes to the replica that has the longest prefix of its documents cached, unless that replica has 1.25
    times its share of this fleet's running requests. Documents that no replica has are routed by a hash. With
    ``document_order="cache_aware"`` order and replica are chosen together. A speculation, its confirmation and its end
    reach the same replica.

    A replica that crashes, hangs or drains is skipped until it answers again. Its requests without a token are sent to
    another replica, and its streams continue there. A request fails only if no replica answers.

    ``stats``, ``forget``, ``prefetch`` and ``drain`` apply to all replicas. ``cache`` is of each replica.
    """

    def __init__(
        self,
        engines: Iterable[Engine],
        *,
        restart_timeout_s: float | None = RESTART_TIMEOUT_S,
        first_token_timeout_s: FirstTokenTimeout = AUTO,
        resume_streams: ResumeStreams = "all",
        finder: ReplicaFinder | None = None,
    ) -> None:
        """Make a fleet of launched or connected engines, which :meth:`close` closes.

        Where none answers, requests wait ``restart_timeout_s`` seconds for one. The rest is as of ``Engine.launch``.
        A ``finder`` adds and removes replicas from then on: :meth:`connect` passes it.

        Raises:
            ConfigError: there are none, one is there twice, or they do not serve the same model in the same way.
        """
        first = tuple(engines)
        _check_same_model(first)
        self._replicas = ReplicaSet(first, restart_timeout_s)
        self._finder = finder
        super().__init__(
            f"{HOME}/v1",
            _NO_KEY,
            self._replicas,
            RetryPolicy(first_token_timeout_s, resume_streams, len(first) if finder is None else _MAX_FOUND),
            replicas=self._replicas,
            cached_prefixes=FleetPrefixes(self._replicas),
        )
        self._prefetching = _EachPrefetches(self._api, self._replicas)
        self.cache = cast("CacheRoutes", _NoSharedCache())
        try:
            self._handshake()
            if finder is not None:
                finder.follow(self._replicas, served_model_identity)
        except BaseException:
            self._close_connections()
            raise

    @property
    def engines(self) -> tuple[Engine, ...]:
        """The present replicas."""
        return tuple(replica.engine for replica in self._replicas.all)

    @classmethod
    def connect(
        cls,
        urls: Sequence[str] | str,
        *,
        refresh_s: float | None = None,
        api_key: str | None = None,
        tokenizer: Literal[False] | None = None,
        timeout_s: float = 10.0,
        restart_timeout_s: float | None = RESTART_TIMEOUT_S,
        hang_timeout_s: float | None = HANG_TIMEOUT_S,
        first_token_timeout_s: FirstTokenTimeout = AUTO,
        resume_streams: ResumeStreams = "all",
    ) -> Self:
        """Connect to running servers, by a list of addresses or one DNS name.

        ``"dns+http://service:8000"`` stands for all servers at the addresses of ``service``, such as a headless service
        of Kubernetes. The fleet begins with those that answer, looks the name up every ``refresh_s`` seconds, and adds
        and removes replicas. If none answers yet, it waits ``restart_timeout_s`` seconds for one. A server that cannot
        be used, for example with another model, is skipped with a warning.

        All servers of a list must answer when the fleet is made. With ``refresh_s`` one is enough, and the others join
        when they answer.

        Args:
            urls: the replicas' addresses, ``["http://a:8000", ...]``, or ``"dns+http://service:8000"``.
            refresh_s: seconds between two look-ups of replicas; by default 5 for a name, none for a list.
            api_key: API key of all replicas.
            tokenizer: see ``Engine.connect``, also for the other arguments.
            timeout_s: seconds in which a replica must answer.
            restart_timeout_s: seconds that a request waits while no replica answers.
            hang_timeout_s: seconds without any answer after which a replica counts as hung.
            first_token_timeout_s: seconds after which a request without a token is sent to another replica.
            resume_streams: which streamed answers continue on another replica: ``"all"``, ``"greedy"`` or ``"off"``.

        Raises:
            ConfigError: no address, one address twice, servers of different models, or a key that no header can carry.
            EngineUnreachableError, EngineAuthError, EngineError: from a replica; see ``Engine.connect``.
        """
        named = ServiceName.of(urls) if isinstance(urls, str) and urls.startswith("dns+") else None
        if named is None and (isinstance(urls, str) or not urls):
            raise ConfigError(
                f"urls is {urls!r:.80}: give a list of the replicas' addresses, ['http://a:8000', "
                "...], or a name that resolves to them, 'dns+http://service:8000'; connect to a "
                "proxy in front of them with Engine.connect(url)"
            )
        check_seconds("refresh_s", refresh_s)
        check_seconds("restart_timeout_s", restart_timeout_s or None)

        check_tokenizer(tokenizer)
        check_api_key(api_key)

        def join(url: str) -> Engine:
            return Engine.connect(
                url,
                api_key=api_key,
                tokenizer=False,  # the fleet imports what requests need
                timeout_s=timeout_s,
                restart_timeout_s=restart_timeout_s,
                hang_timeout_s=hang_timeout_s,
            )

        settings: dict[str, Any] = {
            "restart_timeout_s": restart_timeout_s,
            "first_token_timeout_s": first_token_timeout_s,
            "resume_streams": resume_streams,
        }
        if named is None and refresh_s is None:
            return cls._of_list(urls, join, settings)
        source = named or _ListedAddresses(urls)
        finder = ReplicaFinder(source, join, REFRESH_S if refresh_s is None else refresh_s)
        first = finder.first(restart_timeout_s, served_model_identity)
        try:
            return cls([first], finder=finder, **settings)
        except BaseException:
            finder.close()
            first.close()
            raise

    @classmethod
    def _of_list(cls, urls: Sequence[str], join: Callable[[str], Engine], settings: dict[str, Any]) -> Self:
        """Return a fleet of listed servers, which must all answer."""
        futures: list[Future[Engine]] = []
        try:
            with ThreadPoolExecutor(len(urls)) as threads:
                futures += [threads.submit(join, url) for url in urls]
            return cls([one.result() for one in futures], **settings)
        except BaseException:
            for one in futures:
                if one.done() and one.exception() is None:
                    one.result().close()
            raise

    @classmethod
    async def aconnect(cls, urls: Sequence[str] | str, **settings: Any) -> Self:
        """Do :meth:`connect` without blocking the event loop."""
        return await asyncio.to_thread(cls.connect, urls, **settings)

    def stats(self) -> EngineStats:
        """Return the sum of the counters of all replicas that answer; see ``Engine.stats``."""
        return self._merged(self._map_replicas(lambda engine: engine.stats()))

    async def astats(self) -> EngineStats:
        return await asyncio.to_thread(self.stats)

    def forget(self, doc_ids: Iterable[DocId], *, wait_s: float = 30.0) -> ForgetReceipt:
        """Delete the KV of documents from every replica; see ``Engine.forget``.

        Raises:
            EngineError: a replica did not say that it has; the others have. Ask again when it is back.
        """
        wanted = doc_ids if isinstance(doc_ids, str) else list(doc_ids)
        self._documents.begin(wanted, wait_s)  # delete cached answers first
        receipts = _on_each(lambda engine: engine.forget(wanted, wait_s=wait_s), self._some())
        merged: ForgetReceipt = reduce(ForgetReceipt.merge_replicas, receipts)
        return merged

    async def aforget(self, doc_ids: Iterable[DocId], *, wait_s: float = 30.0) -> ForgetReceipt:
        return await asyncio.to_thread(self.forget, doc_ids, wait_s=wait_s)

    def register(
        self, documents: Iterable[Document], *, progress: Callable[[int], object] | None = None
    ) -> RegistrationReceipt:
        """Register documents with every replica; see ``Engine.register``. Counts those that all replicas registered.

        Raises:
            EngineError: a replica did not say that it has; the others have. Repeat the call when it is back.
        """
        batch = list(documents)
        self._registrations.is_used = True
        receipts: list[RegistrationReceipt] = _on_each(lambda engine: engine.register(batch), self.engines)
        if progress is not None:
            progress(len(batch))
        total = reduce(RegistrationReceipt.merge, receipts)
        return replace(total, num_registered=min(receipt.num_registered for receipt in receipts))

    def register_in_background(self, documents: Iterable[Document]) -> None:
        batch = list(documents)
        self._registrations.is_used = True
        for engine in self.engines:
            engine.register_in_background(batch)

    def drain(self, timeout_s: float) -> bool:
        """Reject new requests in every replica, and return whether the running ones finish in time."""
        return all(_on_each(lambda engine: engine.drain(timeout_s), self.engines))

    def close(self, grace_s: float = GRACE_S) -> None:
        """Close all connections, and stop the launched replicas. Idempotent."""
        if self._process.is_forked:
            return
        if self._finder is not None:
            self._finder.close()
        self._close_connections()
        _on_each(lambda engine: engine.close(grace_s), self.engines)

    def __repr__(self) -> str:
        return f"Fleet(model={self.model!r}, replicas={self._replicas.names()})"

    def _some(self) -> tuple[Engine, ...]:
        """Return the replicas; raise if there is none.

        Raises:
            EngineUnreachableError: none is known.
        """
        if not (engines := self.engines):
            raise EngineUnreachableError("no replica of the fleet is available: check that their servers run")
        return engines

    def _map_replicas(self, ask: Callable[[Engine], _Answer]) -> list[_Answer]:
        """Return the results of the replicas that answer.

        Raises:
            EngineError: none does.
        """

        def one(replica: Replica) -> _Answer | EngineError:
            try:
                return ask(replica.engine)
            except EngineError as error:
                logger.debug("replica %s does not answer: %s", replica.name, error)
                return error

        self._some()
        replicas = self._replicas.ready() or self._replicas.all
        with ThreadPoolExecutor(len(replicas)) as threads:  # hanging replicas time out at the same time
            results = list(threads.map(one, replicas))
        answers = [answer for answer in results if not isinstance(answer, EngineError)]
        if not answers and isinstance(results[0], EngineError):
            raise results[0]
        return answers

    def _merged(self, each_stats: Sequence[EngineStats]) -> EngineStats:
        merged: EngineStats = _STATS.validate_python(merged_report([asdict(stats) for stats in each_stats]))
        return replace(
            merged,
            kv_cache_usage=sum(stats.kv_cache_usage for stats in each_stats) / len(each_stats),
        )


class _NoSharedCache:
    """Replaces ``engine.cache``, since each replica has a cache of its own."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_") or not hasattr(CacheRoutes, name):
            raise AttributeError(name)
        raise ConfigError(
            f"a fleet has no cache.{name}, each replica has a cache of its own: call engine.cache.{name} for each "
            "engine of fleet.engines"
        )


class _EachPrefetches(PrefetchRoute):
    """Prefetches a prompt on each replica; a replica without it on disk reads nothing."""

    def __init__(self, api: ServerAPI, replicas: ReplicaSet) -> None:
        super().__init__(api)
        self._replicas = replicas

    def prefetch(
        self,
        token_ids: Sequence[int],
        cache_salt: str | None = None,
        *,
        model: str | None = None,
        authorization: str | None = None,
    ) -> int:
        """Return the maximum number of tokens that one replica reads. Each request carries the replica's own key."""

        def read(replica: Replica) -> int:
            with suppress(EngineError):
                return replica.engine.integration.prefetching.prefetch(token_ids, cache_salt, model=model)
            return 0

        ready = self._replicas.ready()
        with ThreadPoolExecutor(len(ready) or 1) as threads:
            return max(threads.map(read, ready), default=0)

    async def aprefetch(
        self, token_ids: Sequence[int], cache_salt: str | None = None, *, model: str | None = None
    ) -> int:
        return await asyncio.to_thread(self.prefetch, token_ids, cache_salt, model=model)


def _on_each(call: Callable[[Engine], _Answer], engines: Sequence[Engine]) -> list[_Answer]:
    """Return the results of a call on every engine; raise an error after all calls have ended."""
    with ThreadPoolExecutor(len(engines) or 1) as threads:
        futures = [threads.submit(call, engine) for engine in engines]
    return [future.result() for future in futures]


def _check_same_model(engines: Sequence[Engine]) -> None:
    """Reject engines that are no replicas of each other.

    Raises:
        ConfigError: with what differs.
    """
    if not engines:
        raise ConfigError("a fleet needs at least one replica: pass engines")
    names = [engine.base_url for engine in engines]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"{twice[0]} is named {names.count(twice[0])} times: name each replica once")
    identities = _on_each(served_model_identity, engines)
    for engine, other in zip(engines[1:], identities[1:], strict=True):
        if why := difference(names[0], identities[0], engine.base_url, other):
            raise ConfigError(why)


class _ListedAddresses(list[str]):
    """A fixed list of addresses."""

    def __call__(self) -> list[str]:
        return [url.rstrip("/").removesuffix("/v1") for url in self]
