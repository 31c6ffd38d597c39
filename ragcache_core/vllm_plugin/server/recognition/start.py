"""Start of recognition in an API server, and its registrations' file."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import Any

from vllm.logger import init_logger

from ragcache_core.runtime.tenants import Tenants
from ragcache_core.vllm_plugin.compat import call_registrations, front_end_of
from ragcache_core.vllm_plugin.server.rank_choice import RankChoice
from ragcache_core.vllm_plugin.server.recognition.journal import Journal
from ragcache_core.vllm_plugin.server.recognition.metrics import show_metrics
from ragcache_core.vllm_plugin.server.recognition.service import RecognitionService
from ragcache_core.vllm_plugin.server.recognition.tokenizing import DocumentTokenizer
from ragcache_core.vllm_plugin.server.recognition.wrapper import Recogniser, attach
from ragcache_core.vllm_plugin.settings import PluginSettings

logger = init_logger(f"vllm.{__name__}")


async def start_recognition(
    engine_client: Any, settings: PluginSettings, tenants: Tenants | None, choice: RankChoice | None
) -> tuple[RecognitionService | None, asyncio.Task[None] | None]:
    """Recognise registered documents in all requests of an engine client from now on.

    Returns:
        The registered documents, and the task that follows other API servers; ``None`` where there is nothing to do,
        or this vLLM cannot do it, which is logged.
    """
    if not settings.max_documents:
        return None, None
    try:
        tokenizer = await asyncio.to_thread(DocumentTokenizer, engine_client.renderer.get_tokenizer())
    except Exception as error:  # a model without a tokenizer, or another release
        logger.warning("RC-RECOGNITION-OFF: documents are not recognised, the tokenizer cannot be used: %s", error)
        return None, None
    reader, num_readers = front_end_of(engine_client.vllm_config)
    service = RecognitionService(
        partial(call_registrations, engine_client),
        tokenizer,
        reader=reader,
        num_readers=num_readers,
        journal=_journal_of(engine_client.vllm_config, settings, tokenizer),
        limit=settings.max_documents,
        restricted=() if tenants is None else tenants.restricted,
    )
    await service.begin()
    if not attach(engine_client, Recogniser(service, tenants, choice)):
        return None, None
    show_metrics(service)
    following: Coroutine[Any, Any, None] = _follow(service, engine_client)
    return service, asyncio.create_task(following) if num_readers > 1 else None


async def _follow(service: RecognitionService, engine_client: Any) -> None:
    is_failing = False
    while not engine_client.errored:
        try:
            await service.follow()
        except Exception as error:
            if not is_failing and not engine_client.errored:
                logger.warning("Documents that other API servers register are not recognised here for now: %s", error)
            is_failing = True


def _journal_of(vllm_config: Any, settings: PluginSettings, tokenizer: DocumentTokenizer) -> Journal | None:
    """Return the file beside the disk tier; each tokenizer and each engine of a directory has its own."""
    if settings.directory is None:
        return None
    rank = vllm_config.parallel_config.data_parallel_rank
    name = f"registrations-{tokenizer.sha256[:16]}{f'-{rank}' if rank else ''}.journal"
    return Journal(settings.directory / name)
