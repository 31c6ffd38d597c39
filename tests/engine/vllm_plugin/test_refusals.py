"""What RAGCache refuses to serve: each line names the model or setting, the reason, and the cure.

The table has a row for each refusal of a model, a setting or a machine; the same lines are
in ``docs/reference/errors.md``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import check_json_nesting

from ragcache_core.client.launch.arguments import check_allocator, check_extra_args, vllm_arguments
from ragcache_core.config import CacheConfig
from ragcache_core.errors import ConfigError
from ragcache_core.vllm_plugin.chunks.worker import RAGCacheWorker
from ragcache_core.vllm_plugin.refusals import check_engine
from ragcache_core.vllm_plugin.scheduler.seeded_prefill import SeededWorker
from tests.conftest import ROOT
from tests.engine.vllm_plugin.scheduler_scene import Stage

EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"}
_OURS: dict[str, Any] = {
    "kv_connector": "RAGCacheConnector",
    "kv_connector_module_path": "ragcache_core.vllm_plugin.connector",
    "kv_connector_extra_config": {},
}


def engine(
    *, is_encoder_decoder: bool = False, policy: str = "fcfs", caches_prefixes: bool = True, **transfer: Any
) -> Any:
    """Return of an engine's configuration what is looked at before it is built."""
    return SimpleNamespace(
        model_config=SimpleNamespace(model="some/model", is_encoder_decoder=is_encoder_decoder),
        scheduler_config=SimpleNamespace(
            policy=policy, scheduler_cls="ragcache_core.vllm_plugin.scheduler.RAGCacheScheduler"
        ),
        cache_config=SimpleNamespace(enable_prefix_caching=caches_prefixes),
        kv_transfer_config=SimpleNamespace(**{**_OURS, **transfer}) if transfer != {"kv_connector": None} else None,
    )


def another(connector: str) -> Any:
    """Return an engine with one of vLLM's own connectors."""
    return engine(kv_connector=connector, kv_connector_module_path=None)


def beside(*others: dict[str, Any], ours: int = 1, ragcache: dict[str, Any] | None = None, **changed: Any) -> Any:
    """Return an engine with other connectors before ours."""
    own = {"kv_connector": "RAGCacheConnector", "kv_connector_extra_config": {"ragcache": ragcache or {}}}
    built = engine(
        kv_connector="MultiConnector",
        kv_connector_module_path=None,
        kv_connector_extra_config={"connectors": [*others, *[own] * ours]},
        kv_load_failure_policy=changed.pop("policy", "recompute"),
    )
    workers = {"pipeline_parallel_size": 1, "nnodes": 1, "distributed_executor_backend": "mp", **changed}
    built.parallel_config = SimpleNamespace(**workers)
    return built


NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
EXAMPLE = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}


class Refusal(NamedTuple):
    """Something that is refused, and what its line has to say."""

    ask: Callable[[], object]
    setting: str
    reason: str
    cure: str


REFUSALS = {
    "priority scheduling": Refusal(
        lambda: check_engine(engine(policy="priority")),
        "--scheduling-policy is 'priority'",
        "RAGCache orders the queue",
        "leave it out, or set queue='fifo' and max_prefill_bs=0",
    ),
    "priority scheduling, as the scheduler is built": Refusal(
        lambda: Stage(policy="priority"), "--scheduling-policy is 'priority'", "orders the queue", "leave it out"
    ),
    "an encoder-decoder model": Refusal(
        lambda: check_engine(engine(is_encoder_decoder=True)),
        "'some/model'",
        "an encoder-decoder model, for which vLLM has no KV connectors",
        "serve it without RAGCache (cache=None",
    ),
    "prefix caching switched off": Refusal(
        lambda: check_engine(engine(caches_prefixes=False)),
        "prefix caching is off for 'some/model'",
        "behind KV that was kept vLLM would compute something else",
        "switch it on, or serve it without RAGCache (cache=None",
    ),
    "expandable segments": Refusal(
        lambda: check_allocator(CacheConfig(), EXPANDABLE, []),
        "PYTORCH_CUDA_ALLOC_CONF is 'max_split_size_mb:64,expandable_segments:True'",
        "KV memory may move",
        "unset it, set enable_cumem_allocator=True, or launch without RAGCache",
    ),
    "no connector": Refusal(
        lambda: check_engine(engine(kv_connector=None)), "kv_connector is None", "needs a connector", "leave --sched"
    ),
    **{
        f"{connector} instead of ours": Refusal(
            lambda connector=connector: check_engine(another(connector)),  # type: ignore[misc]
            f"kv_connector is '{connector}'",
            "needs a connector of RAGCache, alone or in vLLM's MultiConnector",
            "set --kv-transfer-config as Engine.launch",
        )
        for connector in ("MultiConnector", "NixlConnector", "LMCacheConnectorV1", "OffloadingConnector")
    },
    "a connector for Engine.launch": Refusal(
        lambda: vllm_arguments({"kv_transfer_config": {"kv_connector": "NixlConnector"}}),
        "kv_transfer_config={'kv_connector': 'NixlConnector'}",
        "another connector beside RAGCache's (NIXL, LMCache) goes into CacheConfig.connectors",
        "use cache=",
    ),
    "a connector for the command line": Refusal(
        lambda: check_extra_args(["--kv-transfer-config"]),
        "--kv-transfer-config cannot be passed",
        "another connector beside RAGCache's",
        "use cache=",
    ),
    "two of RAGCache's connectors": Refusal(
        lambda: check_engine(beside(NIXL, ours=2)), "connectors", "names 2 of RAGCache", "leave all but one out"
    ),
    "vLLM's offloading beside": Refusal(
        lambda: check_engine(beside({"kv_connector": "OffloadingConnector"})),
        "connectors has OffloadingConnector",
        "which would write into RAGCache's host memory",
        "leave it out, and set host_bytes instead",
    ),
    "vLLM's offloading beside, for Engine.launch": Refusal(
        lambda: CacheConfig(connectors=({"kv_connector": "OffloadingConnector"},)),
        "CacheConfig.connectors has OffloadingConnector",
        "which would write into RAGCache's host memory",
        "leave it out",
    ),
    "something else than a connector": Refusal(
        lambda: CacheConfig(connectors=({"connector": "NixlConnector"},)),
        "CacheConfig.connectors has {'connector': 'NixlConnector'}",
        "name one of vLLM's in kv_connector",
        "as {'kv_connector': 'NixlConnector', 'kv_role': 'kv_both'}",
    ),
    "a connector with an engine_id": Refusal(
        lambda: CacheConfig(connectors=({**NIXL, "engine_id": "a"},)),
        "CacheConfig.connectors has an engine_id for NixlConnector",
        "all have the engine's",
        "leave it out",
    ),
    "chunk reuse beside another connector": Refusal(
        lambda: CacheConfig(host_bytes="1GiB", connectors=(NIXL,), chunk_reuse={}),
        "CacheConfig.chunk_reuse is set beside NixlConnector",
        "which would keep approximate KV as if it were exact",
        "leave chunk_reuse or connectors out",
    ),
    "chunk reuse beside another connector, by the engine": Refusal(
        lambda: check_engine(beside(NIXL, ragcache={"chunk_reuse": {}})),
        "chunk_reuse is set",
        "which would keep approximate KV as if it were exact",
        "leave chunk_reuse or connectors out",
    ),
    "KV of 8 bits beside another connector": Refusal(
        lambda: CacheConfig(host_bytes="1GiB", disk_bytes="1GiB", connectors=(NIXL,), compression="int8"),
        "CacheConfig.compression='int8' is set beside NixlConnector",
        "which would keep approximate KV as if it were exact",
        "leave compression='int8' or connectors out",
    ),
    "KV of 8 bits beside chunk reuse": Refusal(
        lambda: CacheConfig(host_bytes="1GiB", disk_bytes="1GiB", chunk_reuse={}, compression="int8"),
        "CacheConfig.compression is 'int8' and chunk_reuse is set",
        "would take the other for exact",
        "leave one of them out",
    ),
    "max_age beside a connector that keeps KV": Refusal(
        lambda: CacheConfig(connectors=(NIXL, EXAMPLE), max_age=60.0),
        "CacheConfig.max_age is 60",
        "KV of ExampleConnector does not expire",
        "leave max_age or connectors out",
    ),
    "another connector, and requests that fail with their KV": Refusal(
        lambda: check_engine(beside(NIXL, policy="fail")),
        "kv_load_failure_policy is 'fail'",
        "with which a request fails whose KV is lost",
        "set it to 'recompute'",
    ),
    "another connector and pipeline stages": Refusal(
        lambda: check_engine(beside(NIXL, pipeline_parallel_size=2)),
        "pipeline_parallel_size is 2",
        "beside other connectors RAGCache does not hear what each stage has in host memory",
        "leave pipeline_parallel_size or connectors out",
    ),
    "another connector and workers elsewhere": Refusal(
        lambda: check_engine(beside(NIXL, distributed_executor_backend="ray")),
        "distributed_executor_backend is 'ray'",
        "beside other connectors RAGCache does not hear where each worker's host memory is",
        "keep all workers on one machine ('mp'), or leave connectors out",
    ),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_a_refusal_names_the_setting_the_reason_and_the_hint(what: str) -> None:
    refusal = REFUSALS[what]
    with pytest.raises(ConfigError) as caught:
        refusal.ask()
    line = str(caught.value)
    for part in refusal[1:]:
        assert part in line
    assert "\n" not in line


def test_what_can_be_served_is_not_refused() -> None:
    check_engine(engine())
    without_order = {"ragcache": {"queue": "fifo", "max_prefill_bs": 0}}
    check_engine(engine(policy="priority", kv_connector_extra_config=without_order))
    check_engine(engine(kv_connector="Mine", kv_connector_module_path="my.connectors"))
    check_engine(beside(NIXL, EXAMPLE))
    check_engine(beside(NIXL, ragcache={"max_age": 60.0}))  # it keeps nothing
    check_allocator(None, EXPANDABLE, [])
    check_allocator(CacheConfig(), {}, [])
    check_allocator(CacheConfig(), EXPANDABLE, ["--enable-sleep-mode"])
    check_allocator(CacheConfig(), EXPANDABLE, ["--enable_cumem_allocator"])


@pytest.mark.parametrize("worker", [SeededWorker, RAGCacheWorker])
def test_an_engine_is_refused_before_its_model_is_loaded(worker: Any) -> None:
    with pytest.raises(ConfigError, match="orders the queue"):
        worker(vllm_config=engine(policy="priority"), local_rank=0, rank=0, distributed_init_method="")


def test_the_page_on_refusals_has_each_line() -> None:
    page = re.sub(r"\s+", " ", Path(ROOT / "docs" / "reference" / "errors.md").read_text())
    for what, refusal in REFUSALS.items():
        assert refusal.reason in page, what


@pytest.mark.parametrize("as_text", [False, True])
def test_vllm_itself_refuses_a_schema_that_is_nested_deeper_than_it_could_send(*, as_text: bool) -> None:
    """Ours looks at metadata alone: without vLLM's check, what it pickles for its workers could end the engine."""
    schema: dict[str, Any] = {}
    for _ in range(63):
        schema = {"a": schema}
    for depth, is_taken in ((64, True), (65, False), (900, False)):
        while depth > _depth(schema):
            schema = {"a": schema}
        asked = json.dumps(schema) if as_text else schema
        if is_taken:
            check_json_nesting(asked)
        else:
            with pytest.raises(VLLMValidationError, match="nested too deeply: .* at most 64 levels"):
                check_json_nesting(asked)


def _depth(schema: dict[str, Any]) -> int:
    depth = 1
    while "a" in schema:
        schema, depth = schema["a"], depth + 1
    return depth
