"""Whose KV it is: whatever changes a chunk's bytes gives it another identity, and nothing else does."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from vllm.config.multimodal import MultiModalConfig

from ragcache_core.errors import ConfigError
from ragcache_core.vllm_plugin.build_context import building
from ragcache_core.vllm_plugin.identity import approximate_type, chunk_identity, kv_identity, shared_identity


class Engine:
    """What an engine's identity is made of; its weights are random bytes in two files."""

    def __init__(self, folder: Path) -> None:
        self.weights = [folder / f"model-{i}.safetensors" for i in range(2)]
        for i, path in enumerate(self.weights):
            path.write_bytes(Random(i).randbytes(3 << 20))
        self.hf_config = {"hidden_size": 64, "rope_scaling": None}
        self.vllm: Any = SimpleNamespace(
            cache_config=SimpleNamespace(
                prefix_caching_hash_algo="sha256", kv_cache_dtype_skip_layers=[], cache_dtype="auto", block_size=32
            ),
            model_config=SimpleNamespace(
                model=str(folder),
                revision=None,
                hf_config=SimpleNamespace(to_dict=lambda: self.hf_config),
                dtype="float32",
                quantization=None,
                quantization_config=None,
                model_impl="auto",
                model_class_overrides={},
                disable_sliding_window=False,
                max_model_len=2048,
                original_max_model_len=None,
                seed=0,
                multimodal_config=None,
            ),
            load_config=SimpleNamespace(load_format="auto", download_dir=None, model_loader_extra_config={}),
            parallel_config=SimpleNamespace(
                cp_kv_cache_interleave_size=1, tensor_parallel_size=1, pipeline_parallel_size=1, rank=0
            ),
            attention_config=SimpleNamespace(backend=None, backend_per_kind={}, indexer_kv_dtype="auto"),
            speculative_config=None,
            kv_transfer_config=SimpleNamespace(kv_connector="RAGCacheConnector", kv_connector_extra_config={}),
        )
        self.offloading: Any = SimpleNamespace(
            model=SimpleNamespace(dtype="float32"),
            cache=SimpleNamespace(tokens_per_hash=32),
            groups=[SimpleNamespace(tokens_per_block=32)],
            kv_cache_layout="HND",
            canonical_layout=False,
            worker_kv_bytes_per_block=4096,
            parallel=SimpleNamespace(tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, data_parallel_index=0),
        )

    def identity(self) -> dict[str, str | int]:
        with building(self.vllm, None):
            return kv_identity(self.offloading)

    def set(self, path: str, value: object) -> None:
        """Set ``vllm.model_config.dtype`` and the like."""
        *parents, name = path.split(".")
        at: Any = self
        for parent in parents:
            at = getattr(at, parent)
        setattr(at, name, value)


def touch(path: Path, change: Callable[[bytearray], object]) -> None:
    """Change a file's bytes, and leave its time as it was."""
    status, data = path.stat(), bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


INT8 = {"ragcache": {"compression": "int8", "disk_bytes": 1 << 20, "host_bytes": 1 << 20}}
CHANGES: dict[str, Callable[[Engine], object]] = {
    "other weights": lambda it: touch(it.weights[1], lambda data: data.reverse()),
    "more weights": lambda it: touch(it.weights[0], lambda data: data.append(0)),
    "a last byte": lambda it: touch(it.weights[0], lambda data: data.__setitem__(-1, data[-1] ^ 1)),
    "weights that changed their names": lambda it: it.weights[0].rename(it.weights[0].with_name("x.safetensors")),
    "a file fewer": lambda it: it.weights[1].unlink(),
    "model configuration": lambda it: it.hf_config.update(rope_scaling={"factor": 2}),
    "dtype": lambda it: it.set("vllm.model_config.dtype", "bfloat16"),
    "quantization": lambda it: it.set("vllm.model_config.quantization", "fp8"),
    "quantisation of what": lambda it: it.set("vllm.model_config.quantization_config", {"linear": "fp8"}),
    "context": lambda it: it.set("vllm.model_config.max_model_len", 4096),
    "a context that was fitted": lambda it: it.set("vllm.model_config.original_max_model_len", -1),
    "another implementation": lambda it: it.set("vllm.model_config.model_impl", "transformers"),
    "another class": lambda it: it.set("vllm.model_config.model_class_overrides", {"A": "package:B"}),
    "no sliding window": lambda it: it.set("vllm.model_config.disable_sliding_window", True),
    "random weights": lambda it: it.set("vllm.model_config.seed", 1),
    "load format": lambda it: it.set("vllm.load_config.load_format", "dummy"),
    "attention backend": lambda it: it.set("vllm.attention_config.backend", "FLASHINFER"),
    "attention backend of some layers": lambda it: it.set(
        "vllm.attention_config.backend_per_kind", {"full_attention": "FLASHINFER"}
    ),
    "dtype of an indexer": lambda it: it.set("vllm.attention_config.indexer_kv_dtype", "fp8"),
    "images": lambda it: it.set("vllm.model_config.multimodal_config", MultiModalConfig()),
    "canonical layout": lambda it: it.set("offloading.canonical_layout", True),
    "keys": lambda it: it.set("vllm.cache_config.prefix_caching_hash_algo", "sha256_cbor"),
    "KV dtype": lambda it: it.set("offloading.model.dtype", "fp8"),
    "layers of another KV dtype": lambda it: it.set("vllm.cache_config.kv_cache_dtype_skip_layers", ["0", "5"]),
    "KV layout": lambda it: it.set("offloading.kv_cache_layout", "NHD"),
    "bytes of a block": lambda it: it.set("offloading.worker_kv_bytes_per_block", 8192),
    "block size": lambda it: it.set("offloading.groups", [SimpleNamespace(tokens_per_block=64)]),
    "tokens per key": lambda it: it.set("offloading.cache.tokens_per_hash", 16),
    "a draft": lambda it: it.set("vllm.speculative_config", SimpleNamespace(method="eagle", draft_model_config=None)),
    "tensor parallel": lambda it: it.set("offloading.parallel.tp_size", 2),
    "tokens of a rank": lambda it: it.set("vllm.parallel_config.cp_kv_cache_interleave_size", 16),
    "other files": lambda it: it.set("vllm.load_config.model_loader_extra_config", {"pattern": "b*"}),
    "code": lambda it: it.weights[0].with_name("modeling_x.py").write_text("x = 1"),
    "what is made of images": lambda it: it.weights[0].with_name("preprocessor_config.json").write_text("{}"),
    "KV of 8 bits": lambda it: it.set("vllm.kv_transfer_config.kv_connector_extra_config", INT8),
    "data parallel": lambda it: it.set("offloading.parallel.data_parallel_index", 1),
}


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("offloading.model.dtype", "fp8", "dtype fp8"),
        ("offloading.groups", [SimpleNamespace(tokens_per_block=32)] * 2, "2 kinds"),
    ],
)
def test_kv_without_a_form_of_8_bits_is_refused(tmp_path: Path, path: str, value: object, said: str) -> None:
    engine = Engine(tmp_path)
    engine.set("vllm.kv_transfer_config.kv_connector_extra_config", INT8)
    engine.set(path, value)
    with building(engine.vllm, None), pytest.raises(ConfigError, match=said):
        approximate_type(engine.offloading, "int8")


@pytest.mark.parametrize("what", CHANGES)
def test_whatever_changes_the_bytes_changes_the_identity(tmp_path: Path, what: str) -> None:
    engine = Engine(tmp_path)
    before = engine.identity()
    assert engine.identity() == before
    CHANGES[what](engine)
    assert engine.identity() != before


def test_two_machines_share_what_differs_in_nothing_but_place_time_and_data_parallel_engine(tmp_path: Path) -> None:
    one, other = (Engine(folder) for folder in (tmp_path / "one", tmp_path / "other") if folder.mkdir() is None)
    os.utime(other.weights[0], (1, 1))
    other.set("offloading.parallel.data_parallel_index", 1)
    identities = []
    for engine in (one, other):
        with building(engine.vllm, None):
            identities.append(shared_identity(engine.offloading))
    assert identities[0] == identities[1]
    assert one.identity() != other.identity()
    other.set("offloading.parallel.tp_size", 2)
    with building(other.vllm, None):
        assert shared_identity(other.offloading) != identities[0]


@pytest.mark.parametrize(
    "said",
    [
        {"mm_processor_kwargs": {"do_rescale": False}},
        {"mm_device_do_normalize": False},
        {"mm_encoder_attn_dtype": "fp8"},
        {"video_pruning_rate": 0.5},
    ],
    ids=lambda said: next(iter(said)),
)
def test_what_the_engine_makes_of_images_changes_the_identity(tmp_path: Path, said: dict[str, Any]) -> None:
    """vLLM's hash of an image has what its request says of it, not what the engine was started with."""
    engine = Engine(tmp_path)
    engine.set("vllm.model_config.multimodal_config", MultiModalConfig())
    before = engine.identity()
    engine.set("vllm.model_config.multimodal_config", MultiModalConfig(mm_processor_cache_gb=1))
    assert engine.identity() == before
    engine.set("vllm.model_config.multimodal_config", MultiModalConfig(**said))
    assert engine.identity() != before


CHANGES_OF_CHUNKS: dict[str, tuple[str, object]] = {
    "dtype": ("vllm.model_config.dtype", "bfloat16"),
    "KV dtype": ("vllm.cache_config.cache_dtype", "fp8"),
    "block size": ("vllm.cache_config.block_size", 64),
    "tensor parallel": ("vllm.parallel_config.tensor_parallel_size", 2),
}


@pytest.mark.parametrize("what", CHANGES_OF_CHUNKS)
def test_whatever_changes_the_bytes_of_a_chunk_changes_its_identity(tmp_path: Path, what: str) -> None:
    engine = Engine(tmp_path)
    before = chunk_identity(engine.vllm)
    assert chunk_identity(engine.vllm) == before
    engine.set(*CHANGES_OF_CHUNKS[what])
    assert chunk_identity(engine.vllm) != before


def test_a_draft_is_known_by_its_method_and_weights(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    folder = tmp_path / "draft"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"one")
    draft = SimpleNamespace(model=str(folder), revision=None)
    engine.set("vllm.speculative_config", SimpleNamespace(method="eagle", draft_model_config=draft))
    before = engine.identity()
    engine.vllm.speculative_config.method = "draft_model"
    assert engine.identity() != before
    engine.vllm.speculative_config.method = "eagle"
    assert engine.identity() == before
    touch(folder / "model.safetensors", lambda data: data.reverse())
    assert engine.identity() != before


def test_another_vllm_and_another_machine_are_other_identities(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(tmp_path)
    before = engine.identity()
    monkeypatch.setattr("vllm.__version__", "0.99")
    assert engine.identity() == {**before, "vllm": "0.99"}
    assert before["platform"]
    real = torch.cpu.get_capabilities()
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: {**real, "amx_tile": not real["amx_tile"]})
    assert engine.identity() == {**before, "vllm": "0.99", "platform": engine.identity()["platform"]}
    assert engine.identity()["platform"] != before["platform"], "vLLM packs KV for the instructions that are there"


def test_a_context_that_is_fitted_to_the_memory_is_the_same_at_every_start(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.set("vllm.model_config.original_max_model_len", -1)
    before = engine.identity()
    engine.set("vllm.model_config.max_model_len", 2017)
    assert engine.identity() == before


def test_layers_of_other_stages_are_another_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(tmp_path)
    before = engine.identity()
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "3,1")
    assert engine.identity() != before


def test_what_does_not_change_the_bytes_does_not_change_the_identity(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    before = engine.identity()
    (tmp_path / "README.md").write_text("about this model")
    (tmp_path / "tokenizer.json").write_text("{}")
    assert engine.identity() == before
    for path in engine.weights:
        path.write_bytes(path.read_bytes())
        os.utime(path, ns=(1, 1))
    assert engine.identity() == before, "weights that were downloaded again"
    engine.hf_config["_name_or_path"] = "elsewhere"
    assert engine.identity() == before, "transformers puts it there"
    assert all(type(value) in (str, int) for value in before.values())


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor"])
def test_keys_that_another_start_does_not_find_again_are_refused(tmp_path: Path, algorithm: str) -> None:
    engine = Engine(tmp_path)
    engine.set("vllm.cache_config.prefix_caching_hash_algo", algorithm)
    with pytest.raises(ConfigError, match=f"prefix_caching_hash_algo is '{algorithm}'.*: use sha256"):
        engine.identity()


def safetensors(path: Path, tensors: dict[str, bytes]) -> None:
    """Write tensors of bytes into a file, its header first."""
    end, header = 0, {}
    for name, data in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [end, end + len(data)]}
        end += len(data)
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(tensors.values()))


@pytest.mark.parametrize("changed", ["norm", "experts", "names"])
def test_each_tensor_of_the_weights_is_looked_at(tmp_path: Path, changed: str) -> None:
    engine = Engine(tmp_path)
    tensors = {"before": bytes(1 << 20), "norm": bytes(64), "experts": bytes(300_000), "after": bytes(1 << 20)}
    safetensors(engine.weights[0], tensors)
    before = engine.identity()
    if changed == "names":
        tensors["other"] = tensors.pop("after")
    else:
        tensors[changed] = bytes(byte ^ 1 for byte in tensors[changed])
    safetensors(engine.weights[0], tensors)
    assert engine.identity() != before


def test_the_weights_of_many_files_are_not_read_for_long(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    for i in range(40):
        with (tmp_path / f"model-{i}.safetensors").open("wb") as file:
            file.truncate(32 << 20)
    before = psutil.Process().io_counters().read_chars
    engine.identity()
    assert psutil.Process().io_counters().read_chars - before < 3000 * 4096


@pytest.mark.parametrize("offsets", ["[-8, 4]", "[0, 1e99]", "[9, 1]", '"ab"', "[[], 3]", "7"])
def test_a_header_that_cannot_be_is_no_reason_to_fail(tmp_path: Path, offsets: str) -> None:
    engine = Engine(tmp_path)
    text = f'{{"a": {{"data_offsets": {offsets}}}}}'.encode()
    engine.weights[0].write_bytes(len(text).to_bytes(8, "little") + text + bytes(1 << 20))
    before = engine.identity()
    touch(engine.weights[0], lambda data: data.__setitem__(len(data) // 2, 1))
    assert engine.identity() != before


def test_weights_of_the_hub_are_found_where_they_were_downloaded_to(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    commit = "0" * 40
    repository = tmp_path / "downloads" / "models--some--model"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").write_bytes(b"one")
    engine.set("vllm.model_config.model", "some/model")
    engine.set("vllm.load_config.download_dir", str(tmp_path / "downloads"))
    before = engine.identity()
    touch(snapshot / "model.safetensors", lambda data: data.reverse())
    assert engine.identity() != before
    engine.set("vllm.load_config.download_dir", None)
    with pytest.raises(ConfigError, match="'some/model' are not on this machine's disk"):
        engine.identity()


def test_weights_that_are_not_here_are_refused(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    for path in engine.weights:
        path.unlink()
    with pytest.raises(ConfigError, match=r"holds no weights \(.*: leave disk_bytes out"):
        engine.identity()
    engine.set("vllm.model_config.model", "no-one/has-this-model")
    with pytest.raises(ConfigError, match="are not on this machine's disk.*: download the model first"):
        engine.identity()
