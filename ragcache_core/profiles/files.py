"""Saved measurements of a model as a file in the user's data folder: name, writing, reading."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import platformdirs

from ragcache_core.errors import ConfigError
from ragcache_core.private_files import make_private_folder, replacing

_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf"}
_SAMPLE_BYTES = 1 << 16
_Kept = TypeVar("_Kept")


def model_identity(model: str) -> str:
    """Return the identity of the weights of ``model``.

    For a folder its name and a digest of its configuration and of the names, sizes, first and last bytes of the
    weights' files, which is a matter of milliseconds for any size; for a name of the hub that name.
    """
    folder = Path(model).expanduser()
    if not folder.is_dir():
        return model
    folder = folder.resolve()
    digest = hashlib.sha256()
    config = folder / "config.json"
    _add(digest, config.read_bytes() if config.is_file() else b"")
    for path in sorted(path for path in folder.iterdir() if path.suffix in _WEIGHTS and path.is_file()):
        with path.open("rb") as file:
            first = file.read(_SAMPLE_BYTES)
            num_bytes = file.seek(0, os.SEEK_END)
            file.seek(max(num_bytes - _SAMPLE_BYTES, 0))
            last = file.read(_SAMPLE_BYTES)
        for part in (os.fsencode(path.name), str(num_bytes).encode(), first, last):
            _add(digest, part)
    return f"{folder.name}-{digest.hexdigest()[:16]}"


def kept_path(folder: str, identity: str, what_for: str) -> Path:
    """Return the path of a measurement of the model with a :func:`model_identity`, for one hardware or use."""
    digest = hashlib.sha256(f"{identity}\0{what_for}".encode("utf-8", "surrogateescape")).hexdigest()[:8]
    name = f"{_slug(identity)}--{_slug(what_for)}-{digest}.json"
    return Path(platformdirs.user_data_dir("ragcache")) / folder / name


def write_json(data: Mapping[str, object], path: Path) -> None:
    """Write plain JSON data to ``path``, and create its folder. Atomic.

    Raises:
        OSError: the disk is full, or the folder cannot be written to.
    """
    make_private_folder(path.parent)
    with replacing(path) as file:
        file.write(json.dumps(data, indent=1).encode() + b"\n")


def read_json(path: Path, read: Callable[[object], _Kept], what: str, cure: str) -> _Kept:
    """Return the result of ``read`` on the JSON data at ``path``.

    Raises:
        ConfigError: the file cannot be read, is damaged, or was written by another version.
    """
    try:
        return read(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as error:  # a JSONDecodeError and a ConfigError are ValueErrors
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{what} {path} cannot be used ({reason}): {cure}") from error


def _add(digest: Any, part: bytes) -> None:
    digest.update(len(part).to_bytes(8, "little"))
    digest.update(part)


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._]+", "-", text).strip("-.")[:80]
