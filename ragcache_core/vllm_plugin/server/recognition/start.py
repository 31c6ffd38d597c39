"""Start recognition in an API server, open its journal, and register its metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

from prometheus_client import Counter, Gauge

from ragcache_core.errors import ConfigError
from ragcache_core.log import logger_of
from ragcache_core.recognition import PromptTexts
from ragcache_core.runtime.tenants import Tenants
from ragcache_core.vllm_plugin.compat import call_registrations, front_end_of, kv_hints_of
from ragcache_core.vllm_plugin.server.rank_choice import RankChoice
from ragcache_core.vllm_plugin.server.recognition.journal import RegistrationJournal
from ragcache_core.vllm_plugin.server.recognition.service import RecognitionService
from ragcache_core.vllm_plugin.server.recognition.tokenizing import DocumentTokenizer
from ragcache_core.vllm_plugin.server.recognition.wrapper import Recogniser, attach
from ragcache_core.vllm_plugin.settings import PluginSettings

_COUNTERS = {
    "num_prompts": ("ragcache_plain_prompts", "Prompts of clients that do not name their documents."),
    "num_recognised": ("ragcache_recognised_documents", "Registered documents recognised in such prompts."),
    "num_ambiguous": ("ragcache_ambiguous_documents", "Recognised documents whose text several ids have."),
    "num_unregistered": ("ragcache_unregistered_prompts", "Such prompts without a registered document."),
    "num_private": ("ragcache_private_prompts", "Such prompts that share no KV, as they may show restricted text."),
}
_shown: list[RecognitionMetrics] = []


class RecognitionMetrics:
    """Metrics of one process, in which Prometheus' client allows each name once."""

    def __init__(self) -> None:
        self._counters = {key: Counter(name, text) for key, (name, text) in _COUNTERS.items()}
        self._documents = Gauge(
            "ragcache_registered_documents", "Registered documents of all tenants.", multiprocess_mode="mostrecent"
        )
        self._before: dict[str, int] = {}

    def show(self, service: RecognitionService) -> None:
        """Add a service's counts since the last call."""
        for key, counter in self._counters.items():
            now = getattr(service.counts, key)
            counter.inc(now - self._before.get(key, 0))
            self._before[key] = now
        self._documents.set(service.figures()["num_documents"])


def show_metrics(service: RecognitionService) -> None:
    """Export a service's statistics on ``/metrics`` of this process."""
    if not _shown:
        _shown.append(RecognitionMetrics())
    service.on_counted = lambda: _shown[0].show(service)
    _shown[0].show(service)


logger = logger_of(__name__)


@dataclass(frozen=True, slots=True)
class StartedRecognition:
    """The started recognition.

    Attributes:
        service: the registered documents; ``None`` where none can be registered.
        following: the task that follows other API servers; ``None`` where there are none.
        texts: finds documents by their texts in prompts; ``None`` for a model without a tokenizer.
        names_documents: it does so in all requests, where clients name documents.
    """

    service: RecognitionService | None
    following: asyncio.Task[None] | None
    texts: PromptTexts | None
    names_documents: bool


async def start_recognition(
    engine_client: Any, settings: PluginSettings, tenants: Tenants | None, choice: RankChoice | None
) -> StartedRecognition:
    """Find named and registered documents in all requests of an engine client; log a reason if impossible.

    Raises:
        ConfigError: it cannot, and a tenant is restricted.
    """
    restricted = frozenset() if tenants is None else tenants.restricted
    tokenizer = await _tokenizer_of(engine_client)
    service = None
    if tokenizer is not None and settings.max_documents:
        service = await _begun(engine_client, settings, restricted, tokenizer)
    texts = None if tokenizer is None else PromptTexts(tokenizer.token_bytes, tokenizer.encode)
    names_documents = texts is not None and attach(
        engine_client, Recogniser(service, tenants, choice, texts, kv_hints_of)
    )
    if not names_documents:
        service = None
    if service is None and restricted:
        named = ", ".join(sorted("operators" if name is None else name for name in restricted))
        raise ConfigError(
            f"{named} of the tenants' file are restricted, and this server recognises no documents: set max_documents "
            "above 0, use a vLLM that docs/dev/vllm-versions.md names, or leave restricted out"
        )
    if service is None:
        return StartedRecognition(None, None, texts, names_documents)
    show_metrics(service)
    _, num_readers = front_end_of(engine_client.vllm_config)
    following = asyncio.create_task(_follow(service, engine_client)) if num_readers > 1 else None
    return StartedRecognition(service, following, texts, names_documents)


async def _tokenizer_of(engine_client: Any) -> DocumentTokenizer | None:
    """Return the tokenizer for documents; ``None``, logged, for a model without one."""
    try:
        return await asyncio.to_thread(
            DocumentTokenizer,
            engine_client.renderer.get_tokenizer(),
            engine_client.vllm_config.model_config.max_model_len,
        )
    except Exception as error:  # a model without a tokenizer, another release
        logger.warning("RC-RECOGNITION-OFF: documents of plain clients are not recognised: %s", error)
        return None


async def _begun(
    engine_client: Any, settings: PluginSettings, restricted: Collection[str | None], tokenizer: DocumentTokenizer
) -> RecognitionService | None:
    """Return the registered documents; ``None``, logged, if this engine cannot keep any.

    Raises:
        ConfigError: the first of several API servers does not begin.
    """
    reader, num_readers = front_end_of(engine_client.vllm_config)
    try:
        service = RecognitionService(
            partial(call_registrations, engine_client),
            tokenizer,
            reader=reader,
            num_readers=num_readers,
            journal=_journal_of(engine_client.vllm_config, settings, tokenizer),
            limit=settings.max_documents,
            restricted=restricted,
        )
        await service.begin()
    except ConfigError:
        raise
    except Exception as error:  # another scheduler, another release
        logger.warning("RC-RECOGNITION-OFF: documents of plain clients are not recognised: %s", error)
        return None
    return service


async def _follow(service: RecognitionService, engine_client: Any) -> None:
    is_failing = False
    while not engine_client.errored:
        try:
            await service.follow()
        except Exception as error:
            if not is_failing and not engine_client.errored:
                logger.warning(
                    "RC-REGISTRATIONS-BEHIND: documents that other API servers register are not recognised here for "
                    "now: %s",
                    error,
                )
            is_failing = True


def _journal_of(vllm_config: Any, settings: PluginSettings, tokenizer: DocumentTokenizer) -> RegistrationJournal | None:
    """Return the journal beside the disk tier, one per tokenizer and engine of a directory."""
    if settings.directory is None:
        return None
    rank = vllm_config.parallel_config.data_parallel_rank
    name = f"registrations-{tokenizer.sha256[:16]}{f'-{rank}' if rank else ''}.journal"
    return RegistrationJournal(settings.directory / name)
