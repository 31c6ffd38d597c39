"""``ragcache serve``: a supervised server in the foreground."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import click

from ragcache_core.cli.command import Command, engine_progress, print_json, say, warnings_in_json
from ragcache_core.cli.options import (
    FiniteRange,
    api_key_option,
    cache_options,
    check_vllm_args,
    log_option,
    read_cache_config,
    startup_timeout_option,
    tokenizer_option,
    vllm_args_argument,
)
from ragcache_core.runtime.environment import API_KEY_ENV

if TYPE_CHECKING:
    from ragcache_core.client import Engine, Fleet

_POLL_S = 1.0


@click.command(
    cls=Command,
    short_help="Serve a model over the OpenAI protocol.",
    examples=[
        "ragcache serve examples/demo_model",
        "ragcache serve examples/demo_model --port 8000 --kv-cache-bytes 512MiB",
        "ragcache serve org/model --host-bytes 64GiB --disk-bytes 1TiB --cache-dir /var/cache/ragcache",
        "ragcache serve org/model --record-trace mine.jsonl",
        "ragcache serve org/model --data-parallel-size 4    # four servers, at ports 8000 to 8003",
        "ragcache serve org/model --cache-config cache.toml --policy pgdsf",
        "ragcache serve org/model --log -    # the log to standard output, as containers want it",
        "ragcache serve org/model --api-key KEY -- --max-model-len 8192 --dtype bfloat16",
    ],
)
@click.argument("model")
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 for all interfaces."
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    show_default=True,
    help="Port to listen on; 0 for a free one.",
)
@click.option(
    "--data-parallel-size",
    type=click.IntRange(1),
    metavar="N",
    help="Start N servers at ports that follow one another, each with GPUs and a part of host memory and disk of its "
    "own; they end together. Join them with Fleet.connect. [default: one server]",
)
@api_key_option
@cache_options
@click.option(
    "--no-cache", is_flag=True, help="Run plain vLLM, without RAGCache; options of the cache then have no effect."
)
@tokenizer_option
@click.option(
    "--max-restarts",
    type=click.IntRange(0),
    default=3,
    show_default=True,
    help="Maximum number of restarts after a crash or hang within --restart-window.",
)
@click.option(
    "--restart-window",
    type=FiniteRange(0, min_open=True),
    default=600.0,
    show_default=True,
    metavar="S",
    help="Window in seconds in which restarts are counted.",
)
@click.option(
    "--hang-timeout",
    type=FiniteRange(0),
    default=30.0,
    show_default=True,
    metavar="S",
    help="Treat the engine as hung after this many seconds without an answer and CPU activity; 0 disables the check.",
)
@startup_timeout_option
@click.option(
    "--drain",
    type=FiniteRange(0),
    default=20.0,
    show_default=True,
    metavar="S",
    help="Seconds that running requests have to finish after SIGTERM.",
)
@click.option(
    "--record-trace",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Record requests as a trace for 'ragcache simulate': times, ids and lengths, no text.",
)
@click.option(
    "--probe-port",
    type=click.IntRange(1, 65535),
    metavar="PORT",
    help="Answer GET /live at this port from the beginning on, also while the model loads and while a dead engine is "
    "started again: for the liveness probe of a container. [default: none]",
)
@log_option
@click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="Format of the log and of this command's output; json: one JSON object per line.",
)
@vllm_args_argument
def serve(
    model: str,
    host: str,
    port: int,
    data_parallel_size: int | None,
    api_key: str | None,
    cache_config: Path | None,
    no_cache: bool,
    tokenizer: str | None,
    max_restarts: int,
    restart_window: float,
    hang_timeout: float,
    startup_timeout: float,
    drain: float,
    record_trace: Path | None,
    probe_port: int | None,
    log: Path | None,
    log_format: Literal["text", "json"],
    vllm_args: tuple[str, ...],
    as_json: bool,
    **cache_settings: Any,
) -> None:
    """Serve MODEL over the OpenAI protocol until Ctrl-C or SIGTERM (exit status 0).

    MODEL is a folder in Hugging Face format, or a name of the hub. Without --api-key a random key is generated and
    printed, unless the log goes to a standard stream. Arguments after -- go to vLLM's server unchanged. A server that
    crashes or hangs is restarted at the same address with the same key. After SIGTERM it rejects new requests, and ends
    when running ones are answered; Ctrl-C, or a second SIGTERM, ends it within seconds.
    """
    check_vllm_args(vllm_args)
    if no_cache and (given := _flags_of({"cache_config": cache_config, **cache_settings})):
        say(f"--no-cache runs plain vLLM: {', '.join(given)} have no effect", level="WARNING", as_json=as_json)
    if no_cache and record_trace is not None:
        raise click.UsageError("--record-trace needs RAGCache: leave out --no-cache.")
    if data_parallel_size is not None and record_trace is not None:
        raise click.UsageError(
            "--record-trace writes the requests of one server: leave out --record-trace or --data-parallel-size."
        )
    if probe_port is not None and port <= probe_port < max(port, 1) + (data_parallel_size or 1):
        raise click.UsageError(f"--probe-port {probe_port} is the server's own port: choose another.")
    cache = None if no_cache else read_cache_config(cache_config, cache_settings)
    from ragcache_core.client import Engine
    from ragcache_core.runtime.trace_recorder import recording_in_server

    in_json, state = log_format == "json", _State()
    settings: dict[str, Any] = {} if data_parallel_size is None else {"data_parallel_size": data_parallel_size}
    with warnings_in_json(in_json), _probes(host, probe_port, state):
        engine: Engine | Fleet = Engine.launch(
            model,
            cache=cache,
            host=host,
            port=port or None,
            api_key=api_key,
            tokenizer=tokenizer,
            startup_timeout_s=startup_timeout,
            max_restarts=max_restarts,
            restart_window_s=restart_window,
            hang_timeout_s=hang_timeout or None,
            log_path=log,
            log_format=log_format,
            progress=engine_progress(as_json=in_json),
            env=None if record_trace is None else recording_in_server(record_trace),
            extra_args=vllm_args,
            **settings,
        )
        with engine:
            engines: Sequence[Engine] = getattr(engine, "engines", None) or (cast("Engine", engine),)
            state.engines = engines
            shows_key = _shows_key(api_key, engines, in_json=in_json)
            _announce(engines, as_json or in_json, has_page=cache is not None, shows_key=shows_key)
            try:
                _watch(engines)
            except KeyboardInterrupt:  # the way to end a server: no error
                say("stopping", as_json=in_json)
            except SystemExit:  # SIGTERM
                state.is_stopping = True
                say(f"stopping: running requests have {drain:g} s", as_json=in_json)
                if not engine.drain(drain):
                    say("requests that still run are cut", level="WARNING", as_json=in_json)


class _State:
    """The command's state for liveness probes."""

    def __init__(self) -> None:
        self.engines: Sequence[Engine] = ()
        self.is_stopping = False

    def __call__(self) -> str:
        if self.is_stopping:
            return "stopping"
        if not self.engines:
            return "loading"
        states = {engine.integration.watch.health().name.lower() for engine in self.engines}
        return "ready" if states == {"ready"} else "restarting"


def _probes(host: str, port: int | None, state: _State) -> AbstractContextManager[object]:
    """Return the probe server; ``None`` without a port."""
    from ragcache_core.client.launch.probes import ProbeServer

    return nullcontext() if port is None else ProbeServer(host, port, state)


def _flags_of(settings: dict[str, object]) -> list[str]:
    """Return the given options as typed."""
    names = (
        param for param in click.get_current_context().command.params if settings.get(param.name or "") is not None
    )
    return [param.opts[0] for param in names]


def _shows_key(api_key: str | None, engines: Sequence[Engine], *, in_json: bool) -> bool:
    """Return whether to print the API key: only a generated one, and not into a container's log."""
    if api_key:
        return False
    from ragcache_core.client.launch.process import is_stream

    if not any(is_stream(engine.log_path) for engine in engines if engine.log_path is not None):
        return True
    hint = f"set --api-key or {API_KEY_ENV}"
    say(f"the random API key is not printed into a log: {hint}", level="WARNING", as_json=in_json)
    return False


def _announce(engines: Sequence[Engine], as_json: bool, *, has_page: bool, shows_key: bool) -> None:
    """Print the address of the server, or of each of several."""
    all_facts = [_facts_of(engine, has_page=has_page, shows_key=shows_key) for engine in engines]
    if as_json:
        ranks = {"ranks": all_facts} if len(engines) > 1 else {}
        print_json({**all_facts[0], **ranks, "pid": os.getpid()})
        return
    for facts in all_facts:
        for name, value in facts.items():
            click.echo(f"{name.replace('_', ' '):<14} {value}")
    if len(engines) > 1:
        urls = ", ".join(f'"{engine.base_url.removesuffix("/v1")}"' for engine in engines)
        click.echo(f"ready: Ctrl-C ends them; Fleet.connect([{urls}], api_key=...) joins them", err=True)
        return
    click.echo("ready: Ctrl-C ends it", err=True)


def _facts_of(engine: Engine, *, has_page: bool, shows_key: bool) -> dict[str, object]:
    return {
        "url": engine.base_url,
        **({"api_key": engine.api_key} if shows_key else {}),
        **({"page": engine.base_url.removesuffix("/v1") + "/ragcache"} if has_page else {}),
        "model": engine.model,
        "max_model_len": engine.max_model_len,
        "log": str(engine.log_path),
    }


def _watch(engines: Sequence[Engine]) -> None:
    """Raise when a server has stopped for good; warnings of the supervisor report restarts."""
    while True:
        time.sleep(_POLL_S)
        for engine in engines:
            engine.num_restarts()
