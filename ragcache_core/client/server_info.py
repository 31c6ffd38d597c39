"""The handshake with a server: which model it serves, and how it tokenises."""

from __future__ import annotations

import importlib
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from ragcache_core.client.http.errors import translate_errors
from ragcache_core.errors import EngineAuthError, EngineError, TokenizerUnavailableError
from ragcache_core.prompt import ChatMessage
from ragcache_core.runtime.tokenizer_files import TokenizerFiles, keep, load_kept, sha256_of

_LAZY = ("openai.resources", "anyio._backends._asyncio", "ragcache_core.client.prompts.chat_template")
"""What openai needs for its first request, httpx for its first asynchronous one, and a prompt: 0.2 to 0.4 s."""


def import_requests() -> None:
    """Import it now."""
    for name in _LAZY:
        importlib.import_module(name)


@contextmanager
def importing_requests() -> Iterator[None]:
    """Import it while the body waits for something else; leaving the body waits for the import to end."""
    thread = threading.Thread(target=import_requests, name="ragcache-imports")
    thread.start()
    try:
        yield
    finally:
        thread.join()


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What a server says of its model: its name there, where it was loaded from, its context window in tokens."""

    name: str
    root: str
    max_model_len: int


@dataclass(frozen=True, slots=True)
class Handshake:
    """Asks a server about itself. ``base_url`` ends in ``/v1``."""

    http: httpx.Client
    base_url: str
    api_key: str

    def model_card(self) -> ModelCard:
        """Return what the server says of its model.

        Raises:
            EngineAuthError: the key is wrong or missing. EngineError: what answers is not a vLLM server.
        """
        with translate_errors():
            page = self.http.get(f"{self.base_url}/models", headers=self._headers())
        if page.status_code in (401, 403):
            raise EngineAuthError(f"the engine at {self.base_url} refused the API key: pass the server's api_key")
        try:
            match page.raise_for_status().json()["data"][0]:
                case {"id": str(name), "max_model_len": int(tokens)} as card if tokens > 0:
                    return ModelCard(name, str(card.get("root") or name), tokens)
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            raise EngineError(f"what answers at {self.base_url} is no vLLM server: it lists no model") from error
        raise EngineError(f"what answers at {self.base_url} is no vLLM server: its model card names no max_model_len")

    def token_ids(
        self, model: str, messages: Sequence[ChatMessage], settings: Mapping[str, Any] | None = None
    ) -> list[int] | None:
        """Return the server's own token ids of ``messages``, or ``None`` if it does not say.

        ``settings`` are the other fields of ``/tokenize``.
        """
        with translate_errors():
            page = self.http.post(
                f"{self.base_url.removesuffix('/v1')}/tokenize",
                json={**(settings or {}), "model": model, "messages": list(messages)},
                headers=self._headers(),
            )
        try:
            return list(page.json()["tokens"]) if page.status_code == 200 else None
        except (ValueError, LookupError, TypeError):
            return None

    def tokenizer_offer(self) -> str | None:
        """Return the SHA-256 of the tokenizer that the server hands out; ``None`` if it hands out none."""
        match self._object("/ragcache/tokenizer"):
            case {"sha256": str(sha256)}:
                return sha256
        return None

    def tokenizer_files(self) -> TokenizerFiles | None:
        """Return the tokenizer that the server hands out; ``None`` if it hands out none.

        It is kept on this machine by its hash, so that it is fetched once.

        Raises:
            TokenizerUnavailableError: the model has none that could be handed out, or it came damaged.
        """
        offer = self._object("/ragcache/tokenizer")
        match offer:
            case {"sha256": str(sha256)} if re.fullmatch("[0-9a-f]{64}", sha256):
                data = load_kept(sha256)
            case {"reason": str(reason)}:
                raise TokenizerUnavailableError(f"the server does not hand out its tokenizer: {reason:.200}")
            case _:
                return None
        if data is None:
            with translate_errors():
                data = self.http.get(f"{self.base_url}/ragcache/tokenizer/{sha256}", headers=self._headers()).content
            if sha256_of(data) != sha256:
                raise TokenizerUnavailableError(
                    f"the tokenizer that {self.base_url} hands out came with another hash than it was offered under: "
                    "connect again, or pass tokenizer= with a folder or a name of the hub"
                )
            keep(data)
        return TokenizerFiles.from_bytes(data)

    def _object(self, path: str) -> dict[str, Any] | None:
        with translate_errors():
            page = self.http.get(f"{self.base_url}{path}", headers=self._headers())
        try:
            value = page.json() if page.status_code == 200 else None
        except ValueError:
            return None
        return value if isinstance(value, dict) else None

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"}
