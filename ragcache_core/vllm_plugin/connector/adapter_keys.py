"""Separate the KV of each load of a LoRA adapter, as vLLM's block hashes contain its path, not its weights."""

from __future__ import annotations

import os
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import uuid4

from ragcache_core.log import logger_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request

logger = logger_of(__name__)

_MAX_REMEMBERED = 10_000
# An adapter whose load is no longer remembered gets a new identity, which is a cache miss.

_Files = tuple[tuple[str, int, int, int], ...]


@dataclass(frozen=True, slots=True)
class _AdapterLoad:
    """One load of an adapter: a random identity, and its files (name, inode, size, time) at the load."""

    identity: str
    files: _Files | None


class AdapterKeys:
    """Puts the identity of an adapter's load into the block hashes of its requests.

    The identity is random. Another load, in this engine or in a later one, therefore shares no KV with it, not even
    where a tier or another connector still has blocks of the former weights.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        """Start without loads."""
        lora = vllm_config.lora_config
        self._max_resident = None if lora is None else lora.max_cpu_loras or lora.max_loras
        self._loads: OrderedDict[int, _AdapterLoad] = OrderedDict()

    def separate(self, request: Request) -> None:
        """Recompute the block hashes of a request with its adapter's identity.

        The identity is a part of ``cache_salt``, which vLLM hashes into the first block and so into all that follow.
        """
        if request.lora_request is None:
            return
        request.cache_salt = f"{request.cache_salt or ''} adapter {self._identity_of(request.lora_request)}"
        request.block_hashes.clear()
        request.update_block_hashes()

    def renew(self, adapter_id: int | None) -> None:
        """Change the identity of an adapter for later requests; ``None`` for all adapters."""
        if adapter_id is None:
            self._loads.clear()
        else:
            self._loads.pop(adapter_id, None)

    def note_load(self, adapter: LoRARequest) -> _AdapterLoad:
        """Return a new identity of an adapter whose files are about to be read."""
        load = self._loads[adapter.lora_int_id] = _AdapterLoad(uuid4().hex, _files_in(adapter.lora_path))
        if len(self._loads) > _MAX_REMEMBERED:
            self._loads.popitem(last=False)
        return load

    def _identity_of(self, adapter: LoRARequest) -> str:
        load = self._loads.get(adapter.lora_int_id) or self.note_load(adapter)
        if self._may_be_read_again(adapter) and load.files != _files_in(adapter.lora_path):
            # The worker may have either version of the files: the request shares no KV.
            logger.warning(
                "RC-ADAPTER-CHANGED: the files of LoRA adapter %s changed after it was loaded: its requests reuse no "
                "KV until it is loaded again with load_inplace",
                adapter.lora_name,
            )
            return uuid4().hex
        return load.identity

    def _may_be_read_again(self, adapter: LoRARequest) -> bool:
        """Return whether a worker may reread an adapter's files without a load request.

        It does so in each step after a load in place, and after the adapter was evicted in favour of others.
        """
        num_known = len(self._loads)
        return adapter.load_inplace or (self._max_resident is not None and num_known > self._max_resident)


def _files_in(path: str) -> _Files | None:
    """Return the files of a folder; ``None`` if there is none, as for a name on a hub."""
    try:
        with os.scandir(path) as entries:
            found = [(entry.name, entry.stat()) for entry in entries if entry.is_file()]
    except OSError:
        return None
    return tuple(sorted((name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in found))
