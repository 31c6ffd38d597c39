"""The cache namespace: everything that KV on disk depends on, so that no other KV is read."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

import torch
import vllm
from vllm.platforms import current_platform

from ragcache_core.chunkstore.quantization import NUMBER_TYPES
from ragcache_core.errors import ConfigError
from ragcache_core.vllm_plugin.build_context import current_context
from ragcache_core.vllm_plugin.compat import OffloadingConfig, hash_seed

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

    from ragcache_core.chunkstore.quantization import NumberType
    from ragcache_core.config import CompressionName

MATCH_KEYS = ("model_config", "parallel", "holds")
"""Fields that older namespaces of an engine share with its own; weights and vLLM may differ."""
_NUM_SAMPLES = 2048
_SAMPLES_OF_A_FILE = 512
_SAMPLE_BYTES = 4096
_MAX_HEADER_BYTES = 64 << 20
_CHUNK_LAYOUT = 1  # of a page: layer by layer, K without RoPE and V
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
_CODE = ("*.py", "*processor_config.json")
_OF_IMAGES = (
    "mm_processor_kwargs",
    "mm_device_do_normalize",
    "mm_encoder_attn_dtype",
    "mm_encoder_fp8_scale_path",
    "video_pruning_rate",
    "video_pruning_method",
)


def kv_identity(config: OffloadingConfig) -> dict[str, str | int]:
    """Return everything that a block's bytes depend on besides its key, for the engine that is being built.

    The weights are identified by their files: names, sizes, headers, and samples of their content. Their times and
    paths do not count: a machine that downloads them again has the same identity.

    Raises:
        ConfigError: the weights' files are not on this machine, so they cannot be identified.
    """
    return _kv_identity(config, f"dp{config.parallel.data_parallel_index}")


def shared_identity(config: OffloadingConfig) -> dict[str, str | int]:
    """Return :func:`kv_identity` without the data-parallel rank, as all ranks have the same KV.

    Raises:
        ConfigError: as there.
    """
    return _kv_identity(config, "any dp")


def _kv_identity(config: OffloadingConfig, engine: str) -> dict[str, str | int]:
    vllm_config = current_context().vllm_config
    parallel = config.parallel
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    seed = hash_seed(algorithm)
    if seed is None:
        raise ConfigError(
            f"prefix_caching_hash_algo is {algorithm!r}, whose keys another start does not find again: use sha256, "
            "vLLM's default, or leave disk_bytes out"
        )
    several = {} if len(config.groups) == 1 else {"groups": _groups(vllm_config, config)}
    setting = current_context().settings.compression
    approximate = {} if approximate_type(config, setting) is None else {"approximate": "int8"}
    return {
        **_model_identity(vllm_config),
        **several,
        **approximate,
        "kv_dtype": _kv_dtype(vllm_config, config.model.dtype),
        "layout": f"{config.kv_cache_layout} {len(config.groups)} {config.worker_kv_bytes_per_block} "
        f"{config.canonical_layout}",
        "tokens_per_block": config.groups[0].tokens_per_block,
        "tokens_per_key": config.cache.tokens_per_hash,
        "keys": f"{algorithm} {seed}",
        "draft": _draft(vllm_config),
        "parallel": f"tp{parallel.tp_size} pp{parallel.pp_size} pcp{parallel.pcp_size} dcp{parallel.dcp_size} "
        f"{engine} {_split(vllm_config)}",
    }


def approximate_type(config: OffloadingConfig, compression: CompressionName) -> NumberType | None:
    """Return the dtype of KV that lower tiers store in 8 bits (``compression="int8"``); ``None`` for exact KV.

    Raises:
        ConfigError: this KV has no 8-bit form.
    """
    if compression != "int8":
        return None
    dtype = config.model.dtype
    if dtype not in NUMBER_TYPES or len(config.groups) > 1:
        what = f"a KV cache of dtype {dtype}" if dtype not in NUMBER_TYPES else f"{len(config.groups)} kinds of layers"
        raise ConfigError(
            f"compression is 'int8', and the model has {what}: it needs one kind of layer with a KV cache of "
            f"{', '.join(NUMBER_TYPES)}; set compression to 'auto'"
        )
    return cast("NumberType", dtype)


def chunk_identity(vllm_config: VllmConfig) -> dict[str, str | int]:
    """Return everything that a chunk's KV (without its position) depends on besides its tokens.

    The parts of all workers are stored together, under the rank that a single worker's store has.

    Raises:
        ConfigError: the weights' files are not on this machine, so their identity is unknown.
    """
    parallel = vllm_config.parallel_config
    return {
        **_model_identity(vllm_config),
        "kv_dtype": _kv_dtype(vllm_config, vllm_config.cache_config.cache_dtype),
        "layout": f"chunks {_CHUNK_LAYOUT}",
        "tokens_per_block": vllm_config.cache_config.block_size,
        "parallel": f"tp{parallel.tensor_parallel_size} pp{parallel.pipeline_parallel_size} rank0",
    }


def _model_identity(vllm_config: VllmConfig) -> dict[str, str | int]:
    """Return the part of the identity for any KV.

    Some models compute otherwise for longer contexts, whatever the prompt: LongRoPE turns keys by other factors, and
    Llama 4 tunes its attention. A length that vLLM fits to the memory (-1) differs from start to start, and is known
    only after the model was loaded, with the longest that it has.
    """
    model, load = vllm_config.model_config, vllm_config.load_config
    folder = _weights_folder(model, load.download_dir)
    return {
        "vllm": str(vllm.__version__),
        "platform": _platform(),
        "weights": _weights_digest(folder),
        "code": _code_digest(folder),
        "model_config": _digest(_json({**model.hf_config.to_dict(), "_name_or_path": None}).encode()),
        "implementation": f"{model.model_impl} {_json(model.model_class_overrides)} {model.disable_sliding_window}",
        "context": "fitted" if model.original_max_model_len == -1 else str(model.max_model_len),
        "dtype": str(model.dtype),
        "quantization": f"{model.quantization} {_json(model.quantization_config)}",
        "load_format": f"{load.load_format} {_digest(_json(load.model_loader_extra_config).encode())} {model.seed}",
        "attention": _digest(_json(vars(vllm_config.attention_config)).encode()),
        "images": _images(model),
    }


def _images(model: ModelConfig) -> str:
    """Return the engine's settings for images and audio, which are not in block keys."""
    images = model.multimodal_config
    return "" if images is None else _json({name: getattr(images, name) for name in _OF_IMAGES})


def _platform() -> str:
    """Return the device; for a CPU its instruction set, by which vLLM packs KV."""
    device = f"{current_platform.device_type} {current_platform.get_device_name()}"
    if not current_platform.is_cpu():
        return device
    can = torch.cpu.get_capabilities()
    return (
        f"{device} {can.get('architecture')} {_digest(_json(sorted(k for k, v in can.items() if v is True)).encode())}"
    )


def _split(vllm_config: VllmConfig) -> str:
    """Return how layers and tokens are divided among workers, if that is configurable."""
    return f"{vllm_config.parallel_config.cp_kv_cache_interleave_size} {os.environ.get('VLLM_PP_LAYER_PARTITION', '')}"


def _code_digest(folder: Path) -> str:
    """Return a digest of a model's files other than weights that change its KV: code, and image processing."""
    digest = hashlib.sha256()
    for path in _files(folder, _CODE):
        digest.update(f"{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _groups(vllm_config: VllmConfig, config: OffloadingConfig) -> str:
    """Return the layers that share blocks, the tokens of a block, and the shape of states."""
    cache = vllm_config.cache_config
    groups = [(group.group_id, group.tokens_per_block, group.layer_names) for group in config.groups]
    states = f"{cache.mamba_cache_dtype} {cache.mamba_ssm_cache_dtype} {cache.mamba_cache_mode}"
    return f"{_digest(_json(groups).encode())} {states}"


def _draft(vllm_config: VllmConfig) -> str:
    """Return method and weights of speculative decoding, as a draft's layers may share blocks."""
    if (speculation := vllm_config.speculative_config) is None:
        return ""
    draft, folder = speculation.draft_model_config, vllm_config.load_config.download_dir
    return f"{speculation.method} {'' if draft is None else _weights_digest(_weights_folder(draft, folder))}"


def _kv_dtype(vllm_config: VllmConfig, dtype: str) -> str:
    """Return the KV dtype, and the layers with another one."""
    return " ".join([dtype, *sorted(vllm_config.cache_config.kv_cache_dtype_skip_layers)])


def _weights_folder(model: ModelConfig, download_dir: str | None) -> Path:
    folder = Path(model.model)
    if folder.is_dir():
        return folder
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    config = None
    with suppress(HFValidationError):  # neither a folder nor the name of a repository
        config = try_to_load_from_cache(model.model, "config.json", cache_dir=download_dir, revision=model.revision)
    if isinstance(config, str):
        return Path(config).parent
    raise ConfigError(
        f"the files of {model.model!r} are not on this machine's disk, so a cache on disk could not tell its weights "
        "from others: download the model first, or leave disk_bytes out"
    )


def _weights_digest(folder: Path) -> str:
    """Return a digest of the weights' names, sizes, headers and samples: the end of each file, and at most 2048 more.

    Of safetensors each tensor has a sample, as long as there are not too many of them.
    """
    digest = hashlib.sha256()
    paths = _files(folder, _WEIGHTS)
    if not paths:
        raise ConfigError(f"{folder} holds no weights ({', '.join(_WEIGHTS)}): leave disk_bytes out")
    places: list[tuple[Path, int]] = []
    for path in paths:
        with path.open("rb", buffering=0) as file:
            size = path.stat().st_size
            header, offsets = _read_header(file, size) if path.suffix == ".safetensors" else (b"", _spread(size))
            digest.update(f"{path.name}\0{size}\0".encode() + header + _sample(file, max(size - _SAMPLE_BYTES, 0)))
        places += [(path, offset) for offset in offsets]
    step = max(-(-len(places) // _NUM_SAMPLES), 1)
    for path, of_path in groupby(places[::step], key=itemgetter(0)):
        with path.open("rb", buffering=0) as file:
            for _, offset in of_path:
                digest.update(_sample(file, offset))
    return digest.hexdigest()


def _read_header(file: BinaryIO, size: int) -> tuple[bytes, list[int]]:
    """Return the header of a safetensors file, and the middle of each tensor."""
    num_bytes = int.from_bytes(file.read(8), "little")
    header = file.read(num_bytes) if num_bytes <= min(size, _MAX_HEADER_BYTES) else b""
    first = 8 + num_bytes
    try:
        tensors = sorted(value["data_offsets"] for name, value in json.loads(header).items() if name != "__metadata__")
        if any(not 0 <= begin <= end <= size - first for begin, end in tensors):
            return header, _spread(size)
    except (ValueError, TypeError, KeyError, AttributeError):  # vLLM could not load it either
        return header, _spread(size)
    return header, [first + max((begin + end - _SAMPLE_BYTES) // 2, begin) for begin, end in tensors]


def _spread(size: int) -> list[int]:
    return list(range(0, size, max(size // _SAMPLES_OF_A_FILE, _SAMPLE_BYTES)))


def _sample(file: BinaryIO, offset: int) -> bytes:
    file.seek(offset)
    return file.read(_SAMPLE_BYTES)


def _files(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    return sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})


def _json(value: object) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
