"""Keys turn as vLLM turns them, and back, for every RoPE that its tables express; the others are refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm.config import DeviceConfig, ModelConfig, VllmConfig
from vllm.config.vllm import set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope

from ragcache_core.vllm_plugin.chunks.model.rope import Rope, unsupported
from tests.conftest import DEMO_MODEL

_HEAD, _MAX = 64, 512
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_SUPPORTED: dict[str, dict[str, Any]] = {
    "default": {"rope_parameters": {"rope_theta": 1e5}},
    "interleaved": {"rope_parameters": {"rope_theta": 1e4}, "is_neox_style": False},
    "partial": {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    "dynamic NTK": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    "llama3": {"rope_parameters": {**_LLAMA3, "original_max_position_embeddings": 128}},
    "YaRN": {"rope_parameters": _YARN},
    "YaRN, interleaved": {"rope_parameters": _YARN, "is_neox_style": False},
}
_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "longrope": (
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0] * (_HEAD // 2),
                "long_factor": [2.0] * (_HEAD // 2),
                "original_max_position_embeddings": 128,
            }
        },
        "LongRoPE",
    ),
    "mrope": ({"rope_parameters": {"rope_theta": 1e4, "mrope_section": [16, 8, 8]}}, "mRoPE"),
}


@pytest.fixture(autouse=True)
def config() -> Iterator[None]:
    model = ModelConfig(model=str(DEMO_MODEL), dtype="float32")
    with set_current_vllm_config(VllmConfig(model_config=model, device_config=DeviceConfig("cpu"))):
        yield


def _made(how: dict[str, Any], dtype: torch.dtype) -> Any:
    return get_rope(_HEAD, _MAX, dtype=dtype, **how)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", _SUPPORTED)
def test_keys_turn_as_vllm_turns_them_and_back(name: str, dtype: torch.dtype) -> None:
    rotary = _made(_SUPPORTED[name], dtype)
    assert unsupported(rotary, _HEAD) is None
    rope, positions = Rope(rotary), torch.tensor([0, 1, 17, 130, 409, 511])
    keys = torch.randn((6, 2, _HEAD), generator=torch.Generator().manual_seed(1)).to(dtype)
    _, turned = rotary.forward_native(positions, keys.flatten(1).clone(), keys.flatten(1).clone())
    ours = rope.rotate(keys, positions)
    limit = 1e-5 if dtype is torch.float32 else 0.05
    torch.testing.assert_close(ours, turned.view_as(keys), atol=limit, rtol=limit)
    torch.testing.assert_close(rope.unrotate(ours, positions), keys, atol=limit, rtol=limit)


@pytest.mark.parametrize("name", _SUPPORTED)
def test_a_key_may_move_from_one_position_to_another(name: str) -> None:
    rope = Rope(_made(_SUPPORTED[name], torch.float32))
    keys = torch.randn((3, 2, _HEAD), generator=torch.Generator().manual_seed(2))
    there, here = torch.tensor([5, 6, 7]), torch.tensor([300, 301, 302])
    moved = rope.rotate(rope.unrotate(rope.rotate(keys, there), there), here)
    torch.testing.assert_close(moved, rope.rotate(keys, here), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", _REFUSED)
def test_a_rope_that_depends_on_more_than_a_position_is_refused_by_name(name: str) -> None:
    how, said = _REFUSED[name]
    reason = unsupported(_made(how, torch.float32), _HEAD)
    assert reason is not None
    assert said in reason


def test_a_table_that_is_not_what_the_module_does_is_refused() -> None:
    rotary = _made({"rope_parameters": {"rope_theta": 777.0}}, torch.float32)
    rotary.cos_sin_cache = rotary.cos_sin_cache.clone()
    kept = rotary.forward_native

    class Other(type(rotary)):  # type: ignore[misc]  # the class is vLLM's choice at run time
        def forward(self, positions: Any, query: Any, key: Any = None) -> Any:
            return kept(positions // 2, query, key)

    rotary.__class__ = Other
    assert "does not turn keys as its table says" in str(unsupported(rotary, _HEAD))
