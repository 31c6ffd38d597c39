"""Options of several commands. Only this module reads the environment."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from ragcache_core.cli.command import engine_progress, options_in_cli_wording
from ragcache_core.cli.settings_options import settings_options
from ragcache_core.config import Bytes, CacheConfig
from ragcache_core.errors import ConfigError
from ragcache_core.prompt import PromptLayout
from ragcache_core.runtime.environment import API_KEY_ENV

if TYPE_CHECKING:
    from ragcache_core.client import Engine
    from ragcache_core.retrieval import DocumentStore

EmbedderName = Literal["builtin", "minilm"]


class FiniteRange(click.FloatRange):
    """A finite number in a range, without nan and inf."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{number} is no finite number.", param, ctx)
        return number


store_option = click.option(
    "--store", type=click.Path(path_type=Path), required=True, metavar="PATH", help="Directory of the document store."
)
embedder_option = click.option(
    "--embedder",
    type=click.Choice(["builtin", "minilm"]),
    help="Embedder of texts: builtin (lexical), or minilm (by meaning; needs the extra minilm). "
    "[default: the store's own, builtin for a new store]",
)
api_key_option = click.option(
    "--api-key", envvar=API_KEY_ENV, show_envvar=True, metavar="KEY", help="API key of the server."
)
tokenizer_option = click.option(
    "--tokenizer",
    metavar="NAME",
    help="Tokenizer of the launched server: a folder, or a name on the Hugging Face hub. [default: the model's own]",
)
log_option = click.option(
    "--log",
    type=click.Path(path_type=Path, allow_dash=True),
    callback=lambda _context, _option, path: Path("/dev/stdout") if str(path) == "-" else path,
    metavar="PATH",
    help="The server's log: a file, /dev/stderr, or - for standard output. [default: a new file, or /dev/stderr "
    "where none can be made]",
)
cache_config_option = click.option(
    "--cache-config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="TOML file with cache settings in a [cache] table. Options override it.",
)
k_option = click.option(
    "-k", "--k", type=click.IntRange(1), help="Documents per question. [default: 2, or fewer if the store has fewer]"
)
temperature_option = click.option(
    "--temperature", type=FiniteRange(0), default=0.0, show_default=True, help="Sampling temperature; 0 is greedy."
)
startup_timeout_option = click.option(
    "--startup-timeout",
    type=FiniteRange(0, min_open=True),
    default=600.0,
    show_default=True,
    metavar="S",
    help="Abort the start after this many seconds without progress in loading.",
)
_LAYOUT = PromptLayout()
vllm_args_argument = click.argument("vllm_args", nargs=-1, type=click.UNPROCESSED, metavar="[-- VLLM_ARGS]...")


def together(*options: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds several options, which the help lists in this order."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


layout_options = together(
    click.option(
        "--static-prefix",
        default=_LAYOUT.static_prefix,
        help="Text before the documents: the system message of a chat model.",
    ),
    click.option(
        "--document-format",
        default=_LAYOUT.document_format,
        help="Template of a document in the prompt; contains {text}.",
    ),
    click.option(
        "--question-format",
        default=_LAYOUT.question_format,
        help="Template of the question in the prompt; contains {question}.",
    ),
)
"""The options of :func:`layout_of`."""
engine_options = together(
    click.option(
        "--model",
        help="Launch a server for this model (a folder, or a name on the Hugging Face hub), and stop it afterwards.",
    ),
    click.option("--url", metavar="URL", help="Send requests to the server at this address instead of launching one."),
    api_key_option,
    tokenizer_option,
    cache_config_option,
)
"""The options of :func:`engine_opener`: a model to launch, or the address of a server."""


def layout_of(options: Mapping[str, str]) -> PromptLayout:
    """Return the prompt layout of :data:`layout_options`."""
    return PromptLayout(
        options["static_prefix"], options["document_format"], question_format=options["question_format"]
    )


def _chunk_reuse(text: str) -> dict[str, object]:
    """Return the settings in ``quality=0.95,selection=cache_craft``, unchecked."""
    settings: dict[str, object] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not (name and equals and value):
            raise click.BadParameter(f"{part!r} is not a setting: write KEY=VALUE, as max_recompute=0.3")
        settings[name.replace("-", "_")] = _plain_value(value)
    return settings


def _connector(text: str) -> dict[str, object]:
    """Return the settings of a connector, unchecked."""
    try:
        settings = json.loads(text)
    except ValueError as error:
        raise click.BadParameter(f"{text!r:.80} is no JSON: {error}") from error
    if not isinstance(settings, dict):
        raise click.BadParameter(f'{text!r:.80} is no object: write {{"kv_connector": "NixlConnector", ...}}')
    return settings


def _plain_value(text: str) -> object:
    """Return a text as number or boolean if it is one."""
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def cache_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add an option per cache setting, under the settings' names."""
    decorate = settings_options(
        CacheConfig,
        keeps_unset=True,
        directory={"flag": "--cache-dir"},
        shared={"metavar": "URL"},
        shared_read_only={"flag": "--shared-read-only/--no-shared-read-only", "metavar": None, "default": None},
        layerwise_loads={"flag": "--layerwise-loads/--no-layerwise-loads", "metavar": None, "default": None},
        connectors={
            "flag": "--connector",
            "type": str,
            "multiple": True,
            "metavar": "JSON",
            "callback": lambda _context, _option, texts: tuple(map(_connector, texts)) or None,
            "help": "Another KV connector of vLLM in addition to RAGCache's, as "
            '\'{"kv_connector": "NixlConnector", "kv_role": "kv_both"}\'; may be repeated. [default: none]',
        },
        chunk_reuse={
            "is_flag": False,
            "flag_value": "",
            "metavar": "[KEY=VALUE,...]",
            "callback": lambda _context, _option, text: None if text is None else _chunk_reuse(text),
            "help": "Reuse KV of documents at other positions in the prompt: APPROXIMATE. With the settings of "
            "ChunkReuse, as selection=cache_craft,max_recompute=0.3. [default: off]",
        },
    )
    return cache_config_option(decorate(command))


def engine_opener(options: Mapping[str, Any], vllm_args: tuple[str, ...]) -> Callable[[], Engine]:
    """Return a function that launches or connects the engine of :data:`engine_options`.

    Raises:
        click.UsageError: neither or both of model and URL, or options of a launch with a URL.
        ConfigError: the file of the cache's configuration cannot work.
    """
    check_vllm_args(vllm_args)
    model, url = options["model"], options["url"]
    if (model is None) == (url is None):
        raise click.UsageError("Give either --model, to launch a server, or --url, to ask one that runs.")
    if url is not None and vllm_args:
        raise click.UsageError(
            "Options of vLLM after '--' configure a launched server, but --url names a running one: leave them out."
        )
    for name, flag in (("tokenizer", "--tokenizer"), ("cache_config", "--cache-config")):
        if url is not None and options[name] is not None:
            raise click.UsageError(
                f"{flag} configures a launched server, but --url names a running one: leave it out, or give --model."
            )
    cache = read_cache_config(options["cache_config"])

    def join() -> Engine:
        from ragcache_core.client import Engine

        if url is not None:
            return Engine.connect(url, api_key=options["api_key"])
        return Engine.launch(
            model,
            cache=cache,
            api_key=options["api_key"],
            tokenizer=options["tokenizer"],
            progress=engine_progress(),
            extra_args=vllm_args,
        )

    return join


def join_server(url: str, api_key: str | None) -> Engine:
    """Return a connection to a running server, for its cache and statistics: it imports nothing for requests."""
    from ragcache_core.client import Engine

    return Engine.connect(url, api_key=api_key, tokenizer=False)


def read_size(_context: click.Context, _option: click.Parameter, text: str) -> int:
    """Return the bytes of a size such as 64MiB."""
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(Bytes).validate_python(text)
    except ValidationError as error:
        raise click.BadParameter(f"{text!r} is not a size: write a number of bytes, as 64MiB or 1000000") from error


def read_cache_config(cache_config: Path | None, settings: Mapping[str, object] | None = None) -> CacheConfig:
    """Return the cache configuration of the file, overridden by options.

    Raises:
        ConfigError: a value that cannot work, or two that contradict each other.
    """
    given: dict[str, Any] = {name: value for name, value in (settings or {}).items() if value is not None}
    if cache_config is not None:
        return CacheConfig.from_toml(cache_config, **given)
    with options_in_cli_wording(click.get_current_context().command):
        return CacheConfig(**given)


def open_store(
    path: Path, embedder: EmbedderName | None, *, read_only: bool = False, rebuild_index: bool = False
) -> DocumentStore:
    """Return the store at ``path`` with its own embedder, or the given one.

    Raises:
        StoreNotFoundError: there is none. EmbedderMismatchError: it was made with another embedder.
        StoreCorruptError, StoreVersionError, StoreLockedError
    """
    from ragcache_core.retrieval import DocumentStore, MiniLMEmbedder
    from ragcache_core.retrieval.storage.manifest import read_manifest

    if embedder is None and read_manifest(path).embedder_name == MiniLMEmbedder.name:
        embedder = "minilm"
    return DocumentStore.open(path, embedder=make_embedder(embedder), read_only=read_only, rebuild_index=rebuild_index)


def make_embedder(name: EmbedderName | None) -> object | None:
    """Return the embedder of a name; ``None`` for the store's own."""
    from ragcache_core.retrieval import MiniLMEmbedder, TfidfSvdEmbedder

    match name:
        case "builtin":
            return TfidfSvdEmbedder()
        case "minilm":
            return MiniLMEmbedder()
        case None:
            return None


_INSTEAD = {
    "--kv-transfer-config": "it sets this itself; another connector goes into --connector",
    "--scheduler-cls": "it sets this itself; --no-cache runs plain vLLM",
    "--kv-offloading-size": "use --host-bytes before it",
    "--kv-offloading-backend": "use --host-bytes before it",
    "--model": "give the model as the first argument",
}
"""What to do instead of an option of vLLM that has no option of the same name here."""


def check_vllm_args(vllm_args: tuple[str, ...]) -> None:
    """Reject arguments after ``--`` that are no options, or that RAGCache sets or needs.

    Raises:
        click.UsageError: with what to do instead.
    """
    from ragcache_core.client.launch.arguments import check_extra_args, check_needed

    if vllm_args and not vllm_args[0].startswith("-"):
        raise click.UsageError(f"Got unexpected argument {vllm_args[0]!r}: vLLM's own options follow '--'.")
    try:
        check_needed(vllm_args)
    except ConfigError as error:
        raise click.UsageError(f"{error}.") from error
    try:
        check_extra_args([argument.replace("_", "-") for argument in vllm_args])
    except ConfigError as error:
        flag = str(error).split()[0].split("=")[0]
        hint = _INSTEAD.get(flag, f"use ragcache's own {flag} before it")
        raise click.UsageError(f"{flag} after '--' would go past RAGCache: {hint}.") from error
