"""The engine: launch vLLM's server as a child process or connect to a running one, send it requests, and stop it."""

from __future__ import annotations

import asyncio
import atexit
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, cast, overload

import httpx

from ragcache_core.client.engine_client import EngineClient
from ragcache_core.client.http.affinity import ProxyAffinity
from ragcache_core.client.http.attempt import AUTO, FirstTokenTimeout, Health, RetryPolicy, check_seconds
from ragcache_core.client.http.remote_server import HANG_TIMEOUT_S, RESTART_TIMEOUT_S, RemoteServerMonitor
from ragcache_core.client.http.resume import ResumeStreams
from ragcache_core.client.launch.launch import LaunchedServer, launch_server
from ragcache_core.client.launch.process import GRACE_S
from ragcache_core.client.launch.settings import LaunchSettings, VLLMOffload
from ragcache_core.client.launch.supervisor import Supervisor
from ragcache_core.client.server_api import Call
from ragcache_core.config import CacheConfig
from ragcache_core.errors import ConfigError, EngineDiedError, EngineError, EngineUnreachableError, quoted
from ragcache_core.runtime.api_keys import check_api_key

if TYPE_CHECKING:
    from ragcache_core.client.fleet.fleet import Fleet

_DRAIN_POLL_S = 0.1
_DRAIN_TIMEOUT_S = 5.0


class Engine(EngineClient):
    """A running vLLM server: generation, statistics, and the prompts of its requests.

    Make one with :meth:`launch` or :meth:`connect`. Both kinds do the same; a launched engine owns its server and ends
    it in :meth:`close`, at the end of a ``with`` block, at the end of the program, and when the program is killed.
    Every method may be called by any thread, the asynchronous ones from any event loop.

    Attributes:
        model: the name under which the server serves its model.
        base_url: the root of its OpenAI protocol, ``http://host:port/v1``.
        api_key: the key that it asks for.
        max_model_len: its context window in tokens.
        log_path: the log of a launched server.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str,
        *,
        watch: Supervisor | RemoteServerMonitor,
        policy: RetryPolicy,
        is_for_requests: bool = True,
        log_path: Path | None = None,
    ) -> None:
        """Connect to the server at ``base_url``; use :meth:`launch` or :meth:`connect` instead.

        Unless it ``is_for_requests``, nothing is imported for them yet. :meth:`close` ends the ``watch``.
        """
        is_behind_proxy = isinstance(watch, RemoteServerMonitor)  # perhaps
        super().__init__(base_url, api_key, watch, policy, replicas=ProxyAffinity() if is_behind_proxy else None)
        self.log_path = log_path
        self._server = watch
        self._closing = threading.Lock()
        atexit.register(self.close, 5.0)
        try:
            self._handshake(is_for_requests=is_for_requests)
        except BaseException:
            self.close()
            raise

    @overload
    @classmethod
    def launch(cls, model: str, *, data_parallel_size: int, **settings: Any) -> Fleet: ...

    @overload
    @classmethod
    def launch(
        cls,
        model: str,
        *,
        cache: CacheConfig | VLLMOffload | None = CacheConfig(),  # noqa: B008 (frozen)
        host: str = "127.0.0.1",
        port: int | None = None,
        api_key: str | None = None,
        tokenizer: str | None = None,
        startup_timeout_s: float = 600.0,
        max_restarts: int = 3,
        restart_window_s: float = 600.0,
        hang_timeout_s: float | None = 30.0,
        first_token_timeout_s: FirstTokenTimeout = AUTO,
        resume_streams: ResumeStreams = "all",
        log_path: str | Path | None = None,
        log_format: Literal["text", "json"] = "text",
        progress: bool | Callable[[str], None] | None = None,
        env: Mapping[str, str] | None = None,
        extra_args: Sequence[str] = (),
        cancel: threading.Event | None = None,
        data_parallel_size: None = None,
        **vllm_args: object,
    ) -> Self: ...

    @classmethod
    def launch(cls, model: str, *, data_parallel_size: int | None = None, **settings: Any) -> Self | Fleet:
        """Start a server for ``model`` as a child process and return it when it is ready.

        Args:
            model: a folder in Hugging Face format, or a name of the hub.
            cache: cache settings; ``None`` runs plain vLLM, a :class:`VLLMOffload` vLLM with its own offloading.
            host: address to listen on; by default loopback.
            port: port to listen on; by default a free one.
            api_key: the key that clients must send; by default a random one.
            tokenizer: folder or name of the server's tokenizer, if it is not the model's.
            startup_timeout_s: maximum seconds (600) of loading without progress: no new log line, and less than 16 MiB
                read or written.
            max_restarts: maximum number of restarts (3) after a crash or hang, within ``restart_window_s`` seconds
                (600). A request in flight before its first token is sent again; afterwards a stream continues where it
                was cut, and fails with :class:`EngineDiedError` if it cannot.
            hang_timeout_s: seconds (30) without an answer, and without CPU time of one of its processes, after which an
                engine counts as hung; ``None`` disables the check.
            first_token_timeout_s: seconds after which a streamed request without a token is cancelled and sent once
                more. ``"auto"``: one second before the request's own time-out, if that is at least 600 s. ``None``:
                never.
            resume_streams: which streamed answers continue after a failure of their engine: ``"all"``; ``"greedy"``,
                which continue exactly; ``"off"``. A sampled answer continues with another random state, and its
                statistics say so (``num_resumes``, ``is_resampled``).
            log_path: file of the server's log; by default a new file in the user's log folder, or standard error if
                that cannot be written.
            log_format: ``"json"`` writes an object for each line: time, level, process and message.
            progress: draw a progress bar on stderr; by default on a terminal. A function is called with each stage
                instead.
            env: variables added to the server's environment.
            extra_args: arguments of vLLM's server, passed unchanged, ``["--max-model-len", "2048"]``.
            cancel: event that cancels the launch when another thread sets it.
            data_parallel_size: number of servers to start, returned as a :class:`Fleet`. Each has its own GPUs, a part
                of host memory and disk, and its own port, from ``port`` on.
            **settings: those above, and arguments of vLLM's server with underscores, ``max_model_len=2048``.

        Raises:
            EngineStartError: the model does not exist, the port is in use, or the server ended or hung before it was
                ready.
            EngineClosedError: the launch was cancelled.
            ConfigError: an argument that is a setting of ``launch`` or ``CacheConfig``, that vLLM does not have, or
                that is of another type; an invalid time.
        """
        launch = LaunchSettings.of(model, settings)
        policy = RetryPolicy(launch.first_token_timeout_s, cast("ResumeStreams", launch.resume_streams))
        if data_parallel_size is not None:
            return cls._launch_fleet(launch, data_parallel_size, policy)
        return cls._of(launch_server(launch), policy)

    @classmethod
    def _of(cls, server: LaunchedServer, policy: RetryPolicy) -> Self:
        return cls(
            server.base_url,
            server.api_key,
            watch=server.supervisor,
            policy=policy,
            log_path=server.log_path,
        )

    @classmethod
    def _launch_fleet(cls, launch: LaunchSettings, size: int, policy: RetryPolicy) -> Fleet:
        from ragcache_core.client.fleet.fleet import Fleet  # which is made of engines
        from ragcache_core.client.launch.ranks import launch_ranks

        servers, engines = launch_ranks(launch_server, launch, size), list[Engine]()
        try:
            for server in servers:
                engines.append(cls._of(server, policy))
            return Fleet(
                engines, first_token_timeout_s=policy.first_token_timeout_s, resume_streams=policy.resume_streams
            )
        except BaseException:
            for engine in engines:
                engine.close()
            for server in servers:
                server.supervisor.close()
            raise

    @overload
    @classmethod
    async def alaunch(cls, model: str, *, data_parallel_size: int, **settings: Any) -> Fleet: ...

    @overload
    @classmethod
    async def alaunch(cls, model: str, *, data_parallel_size: None = None, **settings: Any) -> Self: ...

    @classmethod
    async def alaunch(cls, model: str, **settings: Any) -> Any:
        """Do :meth:`launch` without blocking the event loop. Cancellation stops the server."""
        cancel = threading.Event()

        def launch() -> Any:
            engine = cls.launch(model, cancel=cancel, **settings)
            if cancel.is_set():
                engine.close()
            return engine

        launching: asyncio.Task[Any] = asyncio.ensure_future(asyncio.to_thread(launch))
        try:
            return await asyncio.shield(launching)
        except BaseException:
            cancel.set()
            launching.add_done_callback(_close_result)
            raise

    @classmethod
    def connect(
        cls,
        url: str,
        *,
        api_key: str | None = None,
        tokenizer: Literal[False] | None = None,
        timeout_s: float = 10.0,
        restart_timeout_s: float | None = RESTART_TIMEOUT_S,
        hang_timeout_s: float | None = HANG_TIMEOUT_S,
        first_token_timeout_s: FirstTokenTimeout = AUTO,
        resume_streams: ResumeStreams = "all",
    ) -> Self:
        """Connect to a running server at ``http://host:port`` (with or without ``/v1``).

        A request whose server goes away before its first token is sent again when the server is back. It waits up to
        ``restart_timeout_s`` seconds (0: not at all; ``None``: up to the request's time-out), and a warning is logged.
        :class:`EngineHungError` reports a hung engine: RAGCache's server detects it, or the server does not answer for
        ``hang_timeout_s`` seconds. ``first_token_timeout_s`` and ``resume_streams`` are those of
        :meth:`launch`.

        Documents are recognised in prompts by their texts, and the server finds their tokens. With a server without
        RAGCache, requests work, but statistics do not name their documents. ``tokenizer=False`` imports the packages
        for requests at the first request only, which is faster for reading statistics.

        Raises:
            EngineUnreachableError: no server answers within ``timeout_s`` seconds.
            EngineAuthError: the key is wrong or missing.
            EngineError: the server is not a vLLM server.
            ConfigError: an invalid time, a key that no header can carry, or a ``tokenizer``.
        """
        check_tokenizer(tokenizer)
        check_api_key(api_key)
        if not isinstance(url, str):
            raise ConfigError(f"url is {quoted(url)}: pass the address of a server, 'http://host:8000'")
        if "://" not in url:
            raise ConfigError(f"url is {quoted(url)}, without http:// or https://: write 'http://{url:.80}'")
        policy = RetryPolicy(first_token_timeout_s, resume_streams)
        check_seconds("hang_timeout_s", hang_timeout_s)
        check_seconds("restart_timeout_s", restart_timeout_s or None)
        base_url = url.rstrip("/").removesuffix("/v1") + "/v1"
        try:
            with httpx.Client(transport=httpx.HTTPTransport(), timeout=timeout_s) as client:
                client.get(f"{base_url.removesuffix('/v1')}/health")
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise EngineUnreachableError(
                f"no engine answers at {url} ({error}): is the server running, and the URL right?"
            ) from error
        health_url = f"{base_url.removesuffix('/v1')}/health"
        watch = RemoteServerMonitor(health_url, retry_timeout_s=restart_timeout_s, hang_timeout_s=hang_timeout_s)
        return cls(base_url, api_key or "none", watch=watch, policy=policy, is_for_requests=tokenizer is None)

    @classmethod
    async def aconnect(cls, url: str, **settings: Any) -> Self:
        """Do :meth:`connect` without blocking the event loop."""
        return await asyncio.to_thread(cls.connect, url, **settings)

    # Ending

    @property
    def pid(self) -> int | None:
        """Process id of a launched server."""
        return self._server.pid if isinstance(self._server, Supervisor) else None

    def num_restarts(self) -> int:
        """Return the number of restarts of a launched server. Sends no request.

        Raises:
            EngineDiedError: it died, and is not started again any more.
        """
        if self._server.health() is Health.GONE:
            raise EngineDiedError(self._server.exit_reason())
        return self._server.run - 1

    def drain(self, timeout_s: float) -> bool:
        """Reject new requests and wait for the running ones; call :meth:`close` afterwards.

        New requests get status 503 with ``Retry-After``, and so does ``/ready``. Return whether all running requests
        ended in time; plain vLLM cannot be drained.
        """
        ends_s = time.monotonic() + timeout_s
        draining = Call("/v1/ragcache/drain", _num_running, method="POST", timeout=_DRAIN_TIMEOUT_S, is_sent_once=True)
        while True:
            try:
                num_running = self._api.ask(draining)
            except (EngineError, ValueError, LookupError, TypeError):
                return False
            if num_running == 0 or time.monotonic() >= ends_s:
                return num_running == 0
            time.sleep(_DRAIN_POLL_S)

    def close(self, grace_s: float = GRACE_S) -> None:
        """Close the connections; stop a launched server and all of its processes.

        May be called twice, by several threads (each returns when it is done), and again after an interruption.
        """
        if self._process.is_forked:
            return
        with self._closing:
            try:
                self._close_connections()
            finally:
                self._server.close(grace_s)
            atexit.unregister(self.close)


def check_tokenizer(tokenizer: object) -> None:
    """Reject a client-side tokenizer, which former releases had.

    Raises:
        ConfigError: ``tokenizer`` names one.
    """
    if tokenizer is not None and tokenizer is not False:
        raise ConfigError(
            f"tokenizer is {quoted(tokenizer)}, but a client takes no tokenizer: leave it out. "
            "The server tokenises; to serve with another tokenizer, start the server with "
            "--tokenizer"
        )


def _num_running(answer: httpx.Response) -> int:
    return int(answer.raise_for_status().json()["num_running"])


def _close_result(launching: asyncio.Future[Any]) -> None:
    if not launching.cancelled() and launching.exception() is None:
        threading.Thread(target=launching.result().close, name="ragcache-close").start()
