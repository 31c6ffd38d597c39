"""Start of recognition in an API server, and its registrations' file."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from functools import partial
from typing import Any

from ragcache_core.errors import ConfigError
from ragcache_core.log import logger_of
from ragcache_core.runtime.tenants import Tenants
from ragcache_core.vllm_plugin.compat import call_registrations, front_end_of
from ragcache_core.vllm_plugin.server.rank_choice import RankChoice
from ragcache_core.vllm_plugin.server.recognition.journal import RegistrationJournal
from ragcache_core.vllm_plugin.server.recognition.metrics import show_metrics
from ragcache_core.vllm_plugin.server.recognition.service import RecognitionService
from ragcache_core.vllm_plugin.server.recognition.tokenizing import DocumentTokenizer
from ragcache_core.vllm_plugin.server.recognition.wrapper import Recogniser, attach
from ragcache_core.vllm_plugin.settings import PluginSettings

logger = logger_of(__name__)


async def start_recognition(
    engine_client: Any, settings: PluginSettings, tenants: Tenants | None, choice: RankChoice | None
) -> tuple[RecognitionService | None, asyncio.Task[None] | None]:
    """Recognise registered documents in all requests of an engine client from now on.

    Returns:
        The registered documents, and the task that follows other API servers; ``None`` where there is nothing to do,
        or this vLLM cannot do it, which is logged.

    Raises:
        ConfigError: it cannot, and a tenant is restricted.
    """
    restricted = frozenset() if tenants is None else tenants.restricted
    service = await _begun(engine_client, settings, restricted) if settings.max_documents else None
    if service is not None and not attach(engine_client, Recogniser(service, tenants, choice)):
        service = None
    if service is None and restricted:
        named = ", ".join(sorted("operators" if name is None else name for name in restricted))
        raise ConfigError(
            f"{named} of the tenants' file are restricted, and this server recognises no documents: set max_documents "
            "above 0, use a vLLM that docs/dev/vllm-versions.md names, or leave restricted out"
        )
    if service is None:
        return None, None
    show_metrics(service)
    _, num_readers = front_end_of(engine_client.vllm_config)
    return service, asyncio.create_task(_follow(service, engine_client)) if num_readers > 1 else None


async def _begun(
    engine_client: Any, settings: PluginSettings, restricted: Collection[str | None]
) -> RecognitionService | None:
    """Return the registered documents; ``None`` where this engine cannot keep any, which is logged.

    Raises:
        ConfigError: the first of several API servers does not begin.
    """
    reader, num_readers = front_end_of(engine_client.vllm_config)
    try:
        tokenizer = await asyncio.to_thread(
            DocumentTokenizer,
            engine_client.renderer.get_tokenizer(),
            engine_client.vllm_config.model_config.max_model_len,
        )
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
    except Exception as error:  # a model without a tokenizer, another scheduler, another release
        logger.warning(
            "RC-RECOGNITION-OFF: documents of plain clients are not recognised, clients of RAGCache work as ever: %s",
            error,
        )
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
    """Return the file next to the disk tier; each tokenizer and each engine of a directory has its own."""
    if settings.directory is None:
        return None
    rank = vllm_config.parallel_config.data_parallel_rank
    name = f"registrations-{tokenizer.sha256[:16]}{f'-{rank}' if rank else ''}.journal"
    return RegistrationJournal(settings.directory / name)
