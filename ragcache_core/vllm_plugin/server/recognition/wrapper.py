"""The wrapper of ``EngineClient.generate``: it names the documents of a prompt, and sets the salt of their rights.

All of vLLM's OpenAI handlers call ``generate`` with the prompt's tokens. Salt and data-parallel engine can still be
chosen there. In the engine core it is too late: the hashes of a request's blocks are computed when it is made.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
from array import array
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from ragcache_core.log import logger_of
from ragcache_core.recognition import MIN_TOKENS, PromptTexts, Recognition
from ragcache_core.runtime.rights import is_rights_salt, joined_salt, private_salt, rights_salt
from ragcache_core.runtime.tenants import Tenants, cache_salt_for, mark_of
from ragcache_core.types import PromptSegment, SegmentKind
from ragcache_core.vllm_plugin.server.rank_choice import RankChoice
from ragcache_core.vllm_plugin.server.recognition.service import RecognitionService
from ragcache_core.wire import KEY, MAX_DOCUMENTS, encode_kv_transfer_params, tile

logger = logger_of(__name__)

REGISTER = "register"
"""In a request's ``kv_transfer_params.ragcache``: documents to register before the prompt is looked up."""
_PARAMS = "kv_transfer_params"
_DOCUMENTS = "documents"
_MAX_OFFLOAD = "max_offload_tokens"
"""vLLM's own parameter: how many tokens of a request are stored below the GPU."""
_MAX_TOKEN_ID = 1 << 31
_ARGUMENTS = ("prompt", "sampling_params", "request_id", "data_parallel_rank")


def why_refused(engine_client: Any) -> str | None:
    """Return why ``generate`` of an engine client cannot be wrapped; ``None`` where it can."""
    generate = getattr(type(engine_client), "generate", None)
    if generate is None or not inspect.isasyncgenfunction(generate):
        return "its generate is no asynchronous generator"
    names = list(inspect.signature(generate).parameters)[1:]
    missing = [name for name in _ARGUMENTS if name not in names]
    if missing or names[: len(_ARGUMENTS) - 1] != list(_ARGUMENTS[:-1]):
        return f"its generate takes {', '.join(names)}, without {', '.join(missing) or 'this order'}"
    return None


def attach(engine_client: Any, recogniser: Recogniser) -> bool:
    """Wrap ``generate`` of an engine client; return False, and say so once, where this vLLM refuses it."""
    why = why_refused(engine_client)
    if why is None:
        try:
            engine_client.generate = recogniser.wrapped(engine_client.generate)
        except AttributeError as error:
            why = f"its generate cannot be replaced ({error})"
    if why is not None:
        logger.warning(
            "RC-RECOGNITION-OFF: documents of plain clients are not recognised, clients of RAGCache work as ever. "
            "This vLLM's engine client cannot be wrapped: %s. Install a vLLM that docs/dev/vllm-versions.md names",
            why,
        )
    return why is None


@dataclass(frozen=True, slots=True)
class RecognisedRequest:
    """What ``generate`` gets of a request.

    Attributes:
        prompt: with the salt of its rights.
        sampling_params: with the spans of its documents.
        documents: ids in the order of the prompt, for the choice of a data-parallel engine.
        tenant: the tenant, or None.
        hides_params: the client did not ask for ``kv_transfer_params`` in the answer.
    """

    prompt: Any
    sampling_params: Any
    documents: Sequence[str] = ()
    tenant: str | None = None
    hides_params: bool = False


class Recogniser:
    """Prepares the requests of one API server.

    Args:
        service: knows the registered documents; ``None`` where none are registered.
        tenants: of the server.
        choice: among data-parallel engines; ``None`` where there is one engine.
        texts: finds the documents that a client names by their texts; ``None`` leaves them unnamed.
    """

    def __init__(
        self,
        service: RecognitionService | None,
        tenants: Tenants | None = None,
        choice: RankChoice | None = None,
        texts: PromptTexts | None = None,
    ) -> None:
        self._service = service
        self._choice = choice
        self._texts = texts
        self._secret = "" if tenants is None else tenants.secret
        self._by_mark = {} if tenants is None else {mark_of(name): name for name in tenants.by_name}

    def wrapped(self, generate: Any) -> Any:
        """Return an asynchronous generator function that prepares a request and calls ``generate`` with it."""

        async def generate_with_documents(
            prompt: Any, sampling_params: Any, request_id: str, *args: Any, **kwargs: Any
        ) -> AsyncGenerator[Any, None]:
            ready = await self.prepare(prompt, sampling_params)
            is_chosen_here = self._choice is not None and kwargs.get("data_parallel_rank") is None
            choosing = (
                self._choice.sending(ready.documents, ready.tenant)
                if is_chosen_here and ready.documents and self._choice is not None
                else nullcontext()
            )
            with choosing as rank:
                if rank is not None:
                    kwargs["data_parallel_rank"] = rank
                outputs = generate(ready.prompt, ready.sampling_params, request_id, *args, **kwargs)
                async with aclosing(outputs):
                    async for output in outputs:
                        if ready.hides_params:
                            _hide_params(output)
                        yield output

        return generate_with_documents

    async def prepare(self, prompt: Any, sampling_params: Any) -> RecognisedRequest:
        """Return a request with the documents that it shows, and with the salt that keeps restricted ones apart.

        Raises:
            ValueError: documents that the request registers cannot be registered, or a token id is out of range. vLLM
                answers with status 400.
        """
        unchanged = RecognisedRequest(prompt, sampling_params)
        if not isinstance(prompt, Mapping) or not hasattr(sampling_params, "extra_args"):
            return unchanged  # beams, and prompts that are not known yet: vLLM calls again with the tokens
        salt = prompt.get("cache_salt")
        tenant = self._tenant_of(salt)
        params = dict((sampling_params.extra_args or {}).get(_PARAMS) or {})
        metadata = params.get(KEY)
        if isinstance(metadata, Mapping) and REGISTER in metadata:
            await self._register_inline(tenant, metadata[REGISTER])
            metadata = {name: value for name, value in metadata.items() if name != REGISTER} or None
            params = {**params, KEY: metadata} if metadata else {n: v for n, v in params.items() if n != KEY}
            sampling_params = _with_params(sampling_params, params)
        token_ids = prompt.get("prompt_token_ids") or ()
        _check_ids(token_ids)
        is_plain = not isinstance(metadata, Mapping) or _DOCUMENTS not in metadata
        if isinstance(metadata, Mapping) and (placed := self._placed(metadata.get(_DOCUMENTS), token_ids)) is not None:
            metadata = {**metadata, _DOCUMENTS: placed}
            params = {**params, KEY: metadata}
            sampling_params = _with_params(sampling_params, params)
            is_plain = not placed  # what it names is not what the prompt shows, so it does not know the prompt's rights
        service = self._service
        if service is None:
            return RecognisedRequest(prompt, sampling_params)
        is_restricted = service.is_restricted(tenant)
        if not is_plain and (not is_restricted or not self._is_unsalted(salt, tenant)):
            return RecognisedRequest(prompt, sampling_params)
        found = service.recognise(tenant, token_ids) if token_ids else Recognition((), frozenset(), MIN_TOKENS)
        rights = rights_salt(found.acls)
        is_private = is_plain and is_restricted and not found.is_known and self._is_unsalted(salt, tenant)
        if is_plain:
            service.count(found, is_private=is_private)
        new_salt = self._salt(salt, tenant, rights, is_private=is_private)
        if new_salt != salt:
            prompt = {**prompt, "cache_salt": new_salt}
        if is_private:  # no other request reads its KV from a lower tier
            params = {**params, _MAX_OFFLOAD: 0}
            sampling_params = _with_params(sampling_params, params)
        if not is_plain or not found.documents or not isinstance(metadata, Mapping | None):
            return RecognisedRequest(prompt, sampling_params)
        documents = [
            PromptSegment(SegmentKind.DOCUMENT, each.start, each.end, each.doc_id)
            for each in found.documents[:MAX_DOCUMENTS]
        ]
        named: dict[str, Any] = encode_kv_transfer_params(tile(documents, len(token_ids)))
        if metadata is not None:  # options, which the engine reads and checks
            named[KEY] = {**metadata, _DOCUMENTS: named[KEY][_DOCUMENTS]}
        params = {**params, **named}
        return RecognisedRequest(
            prompt,
            _with_params(sampling_params, params),
            [each.doc_id for each in found.documents],
            tenant,
            hides_params=metadata is None,
        )

    def _placed(self, documents: object, token_ids: Sequence[int]) -> list[Any] | None:
        """Return the documents that a request names by their texts, by their tokens; ``None`` if it names none so.

        A document that the prompt does not show is left out.
        """
        if not isinstance(documents, list) or not any(_has_text(each) for each in documents):
            return None
        shown = [each for each in documents[:MAX_DOCUMENTS] if _has_text(each)]
        if self._texts is None:
            return []
        places = self._texts.find(token_ids, [(each["text"], _skip_of(each)) for each in shown])
        return [
            {
                **{name: value for name, value in each.items() if name not in ("text", "skip")},
                "start": place[0],
                "end": place[1],
            }
            for each, place in zip(shown, places, strict=True)
            if place is not None
        ]

    async def _register_inline(self, tenant: str | None, records: object) -> None:
        if self._service is None:
            raise ValueError(f"kv_transfer_params.{KEY}.{REGISTER}: this server registers no documents: leave it out")
        if not isinstance(records, list) or len(records) > MAX_DOCUMENTS:
            raise ValueError(f"kv_transfer_params.{KEY}.{REGISTER} must be a list of at most {MAX_DOCUMENTS} documents")
        for index, result in enumerate(await self._service.register(tenant, records)):
            if result.error is not None:
                raise ValueError(f"kv_transfer_params.{KEY}.{REGISTER}[{index}]: {result.error}")

    def _tenant_of(self, salt: object) -> str | None:
        return self._by_mark.get(salt.rpartition("-")[0]) if isinstance(salt, str) else None

    def _is_unsalted(self, salt: str | None, tenant: str | None) -> bool:
        """Return whether the client has sent no salt of its own."""
        return not salt if tenant is None else salt == cache_salt_for(tenant, secret=self._secret)

    def _salt(self, salt: str | None, tenant: str | None, rights: str | None, *, is_private: bool) -> str | None:
        """Return the salt of a request; that of known rights is the one that a client of RAGCache sends."""
        if rights is None and not is_private:
            return salt
        own = private_salt() if is_private else None
        if tenant is None:
            if is_rights_salt(salt) and salt != rights:
                salt = f"of the client: {salt}"  # or it would give way to that of the documents, and their readers
            return joined_salt(each for each in (salt or own, rights) if each is not None)
        if self._is_unsalted(salt, tenant):
            return cache_salt_for(tenant, joined_salt(e for e in (own, rights) if e is not None), secret=self._secret)
        digest = hashlib.sha256(f"{salt} {rights}".encode()).hexdigest()
        return f"{mark_of(tenant)}-{digest}"


def _check_ids(token_ids: Sequence[int]) -> None:
    """Refuse token ids that no vocabulary has, before they are looked up as 32-bit numbers.

    Raises:
        ValueError: with the id, its place and the limit.
    """
    try:
        is_valid = not token_ids or int(np.frombuffer(array("I", token_ids), np.uintc).max()) < _MAX_TOKEN_ID
    except OverflowError:  # negative, or more than the array's 32 bits
        is_valid = False
    if not is_valid:
        at, token = next((i, each) for i, each in enumerate(token_ids) if not 0 <= each < _MAX_TOKEN_ID)
        raise ValueError(
            f"token {at} of the prompt is {token}; a token id is 0 to {_MAX_TOKEN_ID - 1}: send those of the model's "
            "tokenizer"
        )


def _has_text(document: object) -> bool:
    return isinstance(document, dict) and isinstance(document.get("text"), str)


def _skip_of(document: Mapping[str, Any]) -> int:
    skip = document.get("skip", 0)
    return min(skip, MAX_DOCUMENTS) if isinstance(skip, int) and skip > 0 else 0


def _with_params(sampling_params: Any, params: Mapping[str, Any]) -> Any:
    """Return a copy with other transfer parameters: the prompts of a list may share one object."""
    changed = copy.copy(sampling_params)
    changed.extra_args = {**(sampling_params.extra_args or {}), _PARAMS: dict(params)}
    return changed


def _hide_params(output: Any) -> None:
    """Remove the request's statistics from an answer to a client that did not name documents."""
    params = getattr(output, _PARAMS, None)
    if isinstance(params, dict) and KEY in params:
        output.kv_transfer_params = {name: value for name, value in params.items() if name != KEY} or None
