"""KV of a LoRA adapter's former weights answers no request: after a load in place, an unload, or new files.

The engine core's methods are vLLM's own, its scheduler is ours. The worker is a model that knows which weights computed
each slot of KV, and fails where a request reads KV of others.
"""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.lora.request import LoRARequest

from ragcache_core.vllm_plugin.compat import EngineCore, attach_utilities
from tests.engine.vllm_plugin.scheduler_scene import Stage
from tests.engine.vllm_plugin.storing_scene import BLOCK, Steps, host_scheduler, request

KINDS: dict[str, dict[str, Any]] = {"sync": {}, "async": {"is_async": True}, "gpu": {"is_async": True, "is_gpu": True}}


def adapter(folder: Path, number: int = 1, *, text: str = "first", load_inplace: bool = False) -> LoRARequest:
    """Return an adapter whose files have this text."""
    path = folder / f"adapter-{number}"
    path.mkdir(exist_ok=True)
    (path / "adapter_model.safetensors").write_text(text)
    return LoRARequest(f"adapter-{number}", number, str(path), load_inplace=load_inplace)


class Core(EngineCore):
    """An engine core whose worker reads the files of an adapter where vLLM's would."""

    def __init__(self, scheduler: Any, weights: dict[int, bytes]) -> None:
        attach_utilities()
        self.scheduler = scheduler
        self._weights = weights
        self.model_executor: Any = SimpleNamespace(
            add_lora=self._read,
            remove_lora=lambda lora_id: self._weights.pop(lora_id, None),
            collective_rpc=lambda method, *args: getattr(self.model_executor, method)(*args[1]),
        )

    def _read(self, lora: LoRARequest) -> bool:
        self._weights[lora.lora_int_id] = (Path(lora.lora_path) / "adapter_model.safetensors").read_bytes()
        return True


def first_step_of(stage: Stage, *args: Any, **kwargs: Any) -> int:
    """Return how many tokens a request computes that an idle engine gets."""
    asked = stage.ask(*args, num_answers=1, **kwargs)
    num_tokens = stage.step()[asked]
    stage.finish_all()
    return num_tokens


def load(core: Core, lora: LoRARequest, method: str) -> None:
    if method == "add_lora":
        core.add_lora(lora)
    else:
        core.collective_rpc("add_lora", args=(lora,))


@pytest.mark.parametrize("method", ["add_lora", "collective_rpc"])
@pytest.mark.parametrize("unloads", [False, True])
def test_an_adapter_that_is_loaded_again_finds_only_kv_of_its_new_weights(
    tmp_path: Path, method: str, *, unloads: bool
) -> None:
    stage = Stage(max_loras=4)
    core = Core(stage.scheduler, stage.weights)
    first, other = adapter(tmp_path), adapter(tmp_path, 2)
    core.add_lora(first)
    core.add_lora(other)
    for each in (first, other, None):
        assert first_step_of(stage, "AB", adapter=each) == 324
        assert first_step_of(stage, "AB", adapter=each) == 4, "its own KV is found"
    second = adapter(tmp_path, text="second", load_inplace=not unloads)
    if unloads:
        core.remove_lora(1)
    load(core, second, method)
    assert first_step_of(stage, "AB", adapter=second) == 324
    assert first_step_of(stage, "AB", adapter=second) == 4
    assert first_step_of(stage, "AB") == 4, "the model's own KV stays"
    if method == "add_lora":
        assert first_step_of(stage, "AB", adapter=other) == 4, "and so does that of other adapters"
    stage.check_nothing_is_left()


@pytest.mark.parametrize("kind", KINDS)
def test_a_load_while_requests_wait_load_and_run_leaves_no_kv_of_the_former_weights(tmp_path: Path, kind: str) -> None:
    stage = Stage(max_loras=4, **KINDS[kind])
    core = Core(stage.scheduler, stage.weights)
    first = adapter(tmp_path)
    core.add_lora(first)
    answering = stage.ask("AB", adapter=first, num_answers=60)
    for _ in range(4):
        stage.step()
    loading = stage.ask("CD", adapter=first, is_loaded=True)
    prefilling = stage.ask("EFGHIJK", adapter=first)
    base = stage.ask("EF", num_answers=30)
    stage.step()
    waiting = stage.ask("ABC", adapter=first)
    second = adapter(tmp_path, text="second", load_inplace=True)
    core.add_lora(second)
    later = stage.ask("AB", adapter=second)
    stage.finish_all()
    for asked in (answering, loading, prefilling, base, waiting, later):
        assert stage.answers[asked] == stage.expected(asked), asked
    assert stage.requests[base].num_preemptions == 0, "requests without the adapter go on"
    stage.check_nothing_is_left()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_loads_at_any_time_leave_every_request_with_kv_of_its_weights(tmp_path: Path, kind: str, seed: int) -> None:
    rng = random.Random(seed)
    stage = Stage(num_blocks=120, max_loras=4, **KINDS[kind])
    core = Core(stage.scheduler, stage.weights)
    adapters = [adapter(tmp_path, number, text="0") for number in (1, 2)]
    for each in adapters:
        core.add_lora(each)
    asked = []
    for number in range(60):
        documents = "".join(rng.sample("ABCD", 2))
        which = rng.choice([*adapters, None])
        speculation = rng.choice([None, None, f"s{number}"])
        asked.append(stage.ask(documents, adapter=which, speculation=speculation, is_loaded=rng.random() < 0.3))
        for _ in range(rng.randrange(3)):
            stage.step()
        if rng.random() < 0.3:
            stage.finish_all_loading()
        if rng.random() < 0.2:
            changed = rng.randrange(2)
            adapters[changed] = adapter(tmp_path, changed + 1, text=f"{number} {rng.random()}")
            core.add_lora(adapters[changed])
    stage.finish_all()
    for each in asked:
        assert stage.answers[each] == stage.expected(each)
    stage.check_nothing_is_left()


@pytest.mark.parametrize("load_inplace", [False, True])
def test_files_that_change_without_a_load_share_no_kv_once_a_worker_may_read_them(
    tmp_path: Path, *, load_inplace: bool
) -> None:
    """A worker reads an adapter again after it was evicted for others, and in every step after a load in place."""
    stage = Stage(max_loras=2)
    core = Core(stage.scheduler, stage.weights)
    first = adapter(tmp_path, load_inplace=load_inplace)
    for each in (first, *([] if load_inplace else [adapter(tmp_path, 2), adapter(tmp_path, 3)])):
        core.add_lora(each)
    assert first_step_of(stage, "A", adapter=first) == 164
    assert first_step_of(stage, "A", adapter=first) == 4, "its files are as they were"
    adapter(tmp_path, text="changed")
    assert first_step_of(stage, "A", adapter=first) == 164, "from the former files, or from the new ones"
    stage.weights[1] = b"changed"
    assert first_step_of(stage, "A", adapter=first) == 164
    core.add_lora(first)
    assert first_step_of(stage, "A", adapter=first) == 164
    assert first_step_of(stage, "A", adapter=first) == 4


def test_no_request_finds_kv_of_former_weights_in_host_memory(tmp_path: Path) -> None:
    first = adapter(tmp_path)
    with host_scheduler(60, "1MiB") as scheduler:
        core, steps = Core(scheduler, {}), Steps(scheduler, is_async=False)

        def num_loaded_tokens(name: str) -> int:
            """Return how many tokens of a prompt a request finds in host memory, with none on the GPU."""
            assert scheduler.reset_prefix_cache()
            asked = request(name, list(range(100, 100 + 6 * BLOCK + 4)), 1)
            asked.lora_request = first
            before = host_hits()
            scheduler.add_request(asked)
            steps.rest()
            return host_hits() - before

        def host_hits() -> int:
            return sum(tier["num_hit_tokens"] for tier in scheduler.report()["tiers"] if tier["name"] == "host")

        core.add_lora(first)
        assert num_loaded_tokens("one") == 0
        assert num_loaded_tokens("two") == 6 * BLOCK
        core.add_lora(adapter(tmp_path, text="second", load_inplace=True))
        assert num_loaded_tokens("three") == 0
        assert num_loaded_tokens("four") == 6 * BLOCK


def test_a_salt_separates_an_adapters_requests_as_others(tmp_path: Path) -> None:
    stage = Stage(max_loras=2)
    first = adapter(tmp_path)
    Core(stage.scheduler, stage.weights).add_lora(first)
    for salt in ("a", "b", None):
        assert first_step_of(stage, "A", adapter=first, salt=salt) == 164
        assert first_step_of(stage, "A", adapter=first, salt=salt) == 4
