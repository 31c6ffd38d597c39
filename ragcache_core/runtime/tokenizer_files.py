"""What a tokenizer is made of: read from a folder, from the hub, or handed out by a server and kept here."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import platformdirs

from ragcache_core.errors import TokenizerUnavailableError
from ragcache_core.private_files import make_folders

_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """A tokenizer, its special tokens, and how its model lays out a chat.

    ``tokenizer`` is the text of a ``tokenizer.json``; ``special_tokens`` has ``bos_token`` and the like;
    ``template_settings`` are further variables of the chat template, ``enable_thinking``. ``wraps_text``: the template
    wants ``[{"type": "text", "text": ...}]`` for a text.
    """

    tokenizer: str
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    chat_template: str | None = None
    template_settings: Mapping[str, Any] = field(default_factory=dict)
    wraps_text: bool = False

    def to_bytes(self) -> bytes:
        """Return it as JSON."""
        return json.dumps(asdict(self), ensure_ascii=False, sort_keys=True).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Return what :meth:`to_bytes` made.

        Raises:
            TokenizerUnavailableError: another release of RAGCache made it.
        """
        try:
            return cls(**json.loads(data))
        except (ValueError, TypeError) as error:
            raise TokenizerUnavailableError(
                f"the server hands out a tokenizer that is not understood here ({error}): install the release of "
                "RAGCache that the server has, or pass tokenizer= with a folder or a name of the hub"
            ) from error

    @classmethod
    def read(cls, model: str | os.PathLike[str]) -> Self:
        """Return the files of ``model``, a folder or a name of the hub.

        Raises:
            TokenizerUnavailableError: they are not there.
        """
        folder = Path(model) if Path(model).is_dir() else _from_hub(os.fspath(model))
        try:
            tokenizer = (folder / "tokenizer.json").read_text(encoding="utf-8")
            settings, marks = (_read_object(folder / name) for name in _FILES[1:3])
            template = folder / "chat_template.jinja"
            written = template.read_text(encoding="utf-8") if template.is_file() else settings.get("chat_template")
        except (OSError, ValueError) as error:
            raise TokenizerUnavailableError(
                f"no tokenizer can be loaded from {os.fspath(model)!r} ({error}): pass tokenizer= with a folder that "
                "holds the model's tokenizer.json, or with a name of the hub"
            ) from error
        return cls(tokenizer, _special_tokens({**marks, **settings}), _default_template(written))


def sha256_of(data: bytes) -> str:
    """Return the hash by which a server names what it hands out."""
    return hashlib.sha256(data).hexdigest()


def load_kept(sha256: str) -> bytes | None:
    """Return what was handed out under this hash before, and kept; ``None`` if it is lost or damaged."""
    try:
        data = _kept(sha256).read_bytes()
    except OSError:
        return None
    return data if sha256_of(data) == sha256 else None


def keep(data: bytes) -> None:
    """Keep what a server handed out, for the next client of this user. Where that cannot be, it is fetched again."""
    path = _kept(sha256_of(data))
    with suppress(OSError):
        make_folders(path.parent)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:  # 0600
            written = Path(file.name)
            try:
                file.write(data)
                file.flush()
                written.replace(path)
            except OSError:
                written.unlink()
                raise


def _kept(sha256: str) -> Path:
    return Path(platformdirs.user_cache_dir("ragcache")) / "tokenizers" / f"{sha256}.json"


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(_FILES)))
    except Exception as error:  # of the hub, of its cache, of the network
        raise TokenizerUnavailableError(
            f"no tokenizer can be loaded from {name!r}, which is no folder here and not at hand from the hub "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}): pass "
            "tokenizer= with a folder that holds the model's tokenizer.json"
        ) from error


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} holds no JSON object")  # noqa: TRY004 (of the file, not of a caller)
    return value


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens among a tokenizer's settings, each a text or ``{"content": text}``."""
    found = {}
    for name, value in settings.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _default_template(written: object) -> str | None:
    """Return the template among those that a model has by name."""
    if isinstance(written, list):
        written = {entry.get("name"): entry.get("template") for entry in written if isinstance(entry, dict)}
        written = written.get("default")
    return written if isinstance(written, str) else None
