"""Start vLLM's OpenAI-compatible server as it is, with our route, and with memory as it does a CPU good."""

from __future__ import annotations

import os
import shutil
import sys
from argparse import ArgumentParser
from collections.abc import Mapping, MutableMapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path

from ragcache_core.config import OWN_CONNECTORS
from ragcache_core.runtime.environment import CPU_KV_CACHE_BYTES_ENV
from ragcache_core.runtime.shared_memory import SHARED_MEMORY
from ragcache_core.vllm_plugin.other_connectors import MODULE

ENDPOINT_PLUGIN = "ragcache"
"""The name of our entry point in ``vllm.endpoint_plugins`` (``pyproject.toml``)."""
CPU_BLOCK_SIZE = 32
"""Tokens in a block on a CPU, the fewest that its attention takes. vLLM's 128 are more than many documents have, and
what is shorter than a block is never cached by itself."""
_KV_MEMORY_FLAGS = {"--kv-cache-memory-bytes", "--gpu-memory-utilization", "--num-gpu-blocks-override"}
_PLUGINS_ENV = "VLLM_PLUGINS"
_PLUGIN_GROUPS = (
    "vllm.general_plugins",
    "vllm.platform_plugins",
    "vllm.io_processor_plugins",
    "vllm.stat_logger_plugins",
)
_SEPARATE_WORKER_ENV = "VLLM_ENABLE_V1_MULTIPROCESSING"
_START_METHOD_ENV = "VLLM_WORKER_MULTIPROC_METHOD"
_BINDING_ENV = "VLLM_CPU_OMP_THREADS_BIND"
_QUEUES_BYTES = 512 << 20
"""In vLLM 0.32 the queue to the workers takes 160 MiB, and that from each of them 240."""
_MALLOC = {"MALLOC_TRIM_THRESHOLD_": str(1 << 30), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}
"""For glibc, in bytes: what is freed is kept up to a GiB, and no block below 32 MiB (glibc's maximum) is a mapping of
its own."""


def run_api_server() -> None:
    """Run vLLM's OpenAI-compatible server with the arguments in ``sys.argv``; returns when it has shut down.

    ``vllm serve`` itself asks for the metadata of a distribution called ``vllm``, which the CPU build
    (``vllm-cpu``) does not have.
    """
    if uses_ragcache(sys.argv):
        _allow_endpoints()
    from vllm.entrypoints.launchers.api_server.entry import main
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        sys.argv += cpu_defaults(sys.argv, os.environ)
        keep_freed_memory(os.environ)
        keep_worker_inside(os.environ)
    if num_front_ends_of(sys.argv) > 1:
        _run_front_ends()
    else:
        main()


def num_front_ends_of(arguments: Sequence[str]) -> int:
    """Return how many API servers the arguments ask for in front of the engine."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--api-server-count", "--api_server_count", "-asc", type=int, default=1)
    return int(parser.parse_known_args(arguments)[0].api_server_count)


def _run_front_ends() -> None:
    """Run ``vllm serve`` with several API servers: vLLM's ``main`` starts only one, in this process."""
    from vllm.entrypoints.cli.serve import FlexibleArgumentParser, cmd_init

    os.environ.setdefault(_START_METHOD_ENV, "spawn")  # as vLLM's main does
    (serve,) = cmd_init()
    parser = FlexibleArgumentParser()
    serve.subparser_init(parser.add_subparsers())
    arguments = parser.parse_args([serve.name, *sys.argv[1:]])
    serve.validate(arguments)
    serve.cmd(arguments)


def uses_ragcache(arguments: Sequence[str]) -> bool:
    """Return whether the server's arguments name a connector of ours; else it is plain vLLM."""
    names = (MODULE, *(f'"{name}"' for name in OWN_CONNECTORS))  # within a MultiConnector the name is enough
    return any(name in argument for argument in arguments for name in names)


def cpu_defaults(arguments: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return the arguments to add on a CPU, where vLLM's own defaults do not do."""
    flags = {argument.split("=")[0].replace("_", "-") for argument in arguments}
    added = []
    memory = environ.get(CPU_KV_CACHE_BYTES_ENV)
    if memory and flags.isdisjoint(_KV_MEMORY_FLAGS) and not environ.get("VLLM_CPU_KVCACHE_SPACE"):
        added += ["--kv-cache-memory-bytes", memory]
    if uses_ragcache(arguments) and "--block-size" not in flags:
        added += ["--block-size", str(CPU_BLOCK_SIZE)]
    return added


def keep_freed_memory(environ: MutableMapping[str, str]) -> None:
    """Let glibc keep what a model frees, in processes that begin with ``environ``, unless the user tunes it himself.

    On a CPU a step's activations come from glibc, which returns them to the kernel after the step, and every page of
    the next step's is a fault again: 200,000 for 35,000 tokens were measured, a tenth of the time. That ends but for
    activations of more than 32 MiB each. An allocator that is preloaded instead takes no notice.
    """
    if not any(name.startswith("MALLOC_") for name in environ) and "malloc" not in environ.get("GLIBC_TUNABLES", ""):
        environ.update(_MALLOC)


def keep_worker_inside(environ: MutableMapping[str, str], folder: Path = SHARED_MEMORY) -> None:
    """Let the engine's process be the worker's too where a second one brings nothing, or has no room for its queues.

    Without a GPU vLLM gives the worker a process of its own, in which it can bind threads to cores, and refuses to
    start where the queues to it do not fit in shared memory, as in containers. With ``nobind`` nothing is bound, and a
    process less to start is a third of a start's processor time. Several workers have processes in any case.
    """
    if environ.get(_BINDING_ENV) == "nobind" or shutil.disk_usage(folder).free < _QUEUES_BYTES:
        environ.setdefault(_SEPARATE_WORKER_ENV, "0")


def _allow_endpoints() -> None:
    """Name our endpoint plugin in ``VLLM_PLUGINS``, which vLLM asks for; where nothing was named, name all others."""
    named = os.environ.get(_PLUGINS_ENV)
    names = (
        [point.name for group in _PLUGIN_GROUPS for point in entry_points(group=group)]
        if named is None
        else [name for name in named.split(",") if name]
    )
    os.environ[_PLUGINS_ENV] = ",".join(dict.fromkeys([*names, ENDPOINT_PLUGIN]))
