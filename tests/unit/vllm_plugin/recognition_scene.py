"""API servers of one engine core, with a tokenizer of words and clients that answer with what they were asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ragcache_core.runtime.tenants import Tenants
from ragcache_core.vllm_plugin.registrations import PersistentRegistrations
from ragcache_core.vllm_plugin.server.rank_choice import RankChoice
from ragcache_core.vllm_plugin.server.recognition.journal import RegistrationJournal
from ragcache_core.vllm_plugin.server.recognition.service import RecognitionService
from ragcache_core.vllm_plugin.server.recognition.tokenizing import DocumentTokenizer
from ragcache_core.vllm_plugin.server.recognition.wrapper import Recogniser, attach
from ragcache_core.wire import KEY

ACME, OTHER = "a" * 32, "b" * 32
SUN = "The sun is a star, and every planet goes around it in its own time and on its own way."
WAGES = "No employee of Zorval earns more than thirty times what the youngest one earns in a year."
SUIT = "Zorval was sued in spring, and has offered to pay a third of what was asked of it then."


class WordTokenizer:
    """A word or a sign is a token; ``<end>`` is a control token."""

    all_special_ids = (0,)

    def __init__(self) -> None:
        self._ids = {"<end>": 0}

    def get_vocab(self) -> dict[str, int]:
        return {"<end>": 0}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        words = text.replace(",", " , ").replace(".", " . ").replace("\n", " \n ").split(" ")
        return [self._ids.setdefault(word, len(self._ids)) for word in words if word]


class EngineClient:
    """vLLM's client, as far as the wrapper knows it: it answers with what it was given."""

    def __init__(self) -> None:
        self.asked: list[SimpleNamespace] = []
        self.num_closed = 0

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, *, data_parallel_rank: int | None = None
    ) -> AsyncGenerator[Any, None]:
        params = (sampling_params.extra_args or {}).get("kv_transfer_params") or {}
        asked = SimpleNamespace(prompt=prompt, params=params, rank=data_parallel_rank)
        self.asked.append(asked)
        try:
            for _ in range(3):
                await asyncio.sleep(0)
                yield SimpleNamespace(kv_transfer_params={**params, KEY: {"num_gpu_tokens": 1}, "other": 1})
        finally:
            self.num_closed += 1


class Server:
    """API servers of one engine core."""

    def __init__(
        self, num_servers: int = 1, tenants: Tenants | None = None, path: Path | None = None, **settings: Any
    ) -> None:
        self.tokenizer = WordTokenizer()
        self.kept = PersistentRegistrations()
        self.clients = [EngineClient() for _ in range(num_servers)]
        self.services = [
            RecognitionService(
                self._call,
                DocumentTokenizer(self.tokenizer),
                reader=i,
                num_readers=num_servers,
                journal=None if path is None else RegistrationJournal(path),
                restricted=() if tenants is None else tenants.restricted,
                **settings,
            )
            for i in range(num_servers)
        ]
        for service in self.services:
            service._tokenizer._tokenizer = self.tokenizer  # one vocabulary
        self._tenants = tenants

    async def _call(self, action: str, body: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(0)
        return self.kept.act(action, body)

    async def begin(self, choice: RankChoice | None = None) -> Server:
        for service, client in zip(self.services, self.clients, strict=True):
            await service.begin()
            assert attach(client, Recogniser(service, self._tenants, choice))
        return self

    async def register(self, *documents: dict[str, Any], tenant: str | None = None, server: int = 0) -> list[Any]:
        results = await self.services[server].register(tenant, list(documents))
        return [result.error or result.is_registered for result in results]

    async def ask(
        self, text: str, salt: str | None = None, params: dict[str, Any] | None = None, server: int = 0
    ) -> tuple[SimpleNamespace, list[Any]]:
        """Return what the engine's client got, and what the client sees."""
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        prompt = {"prompt_token_ids": tokens, **({} if salt is None else {"cache_salt": salt})}
        extra = None if params is None else {"kv_transfer_params": params}
        sampling = SimpleNamespace(extra_args=extra)
        seen = [each async for each in self.clients[server].generate(prompt, sampling, "r")]
        assert sampling.extra_args == extra, "the prompts of a list share it"
        return self.clients[server].asked[-1], seen


def shown(asked: SimpleNamespace) -> list[str]:
    return [document["id"] for document in asked.params.get(KEY, {}).get("documents", [])]


def document(doc_id: str, text: str, *groups: str) -> dict[str, Any]:
    return {"id": doc_id, "text": text, **({"acl": list(groups)} if groups else {})}
