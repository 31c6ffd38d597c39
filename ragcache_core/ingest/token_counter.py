"""Count tokens of texts with a model's tokenizer, from a folder or the Hugging Face hub."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ragcache_core.errors import TokenizerUnavailableError
from ragcache_core.prompt import escape_documents

_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


class TokenCounter:
    """Counts a text's tokens in the prompts of a model. Needs the extra ``retrieval``.

    Attributes:
        sha256: names the tokenizer.
    """

    def __init__(self, model: str | os.PathLike[str]) -> None:
        """Load the tokenizer of ``model``: a folder, or a name on the hub.

        Raises:
            TokenizerUnavailableError: there is no ``tokenizer.json``, it is damaged, or a package is missing.
        """
        folder = Path(model) if Path(model).is_dir() else _from_hub(os.fspath(model))
        try:
            tokenizer = (folder / "tokenizer.json").read_text(encoding="utf-8")
            settings, marks = (_read_object(folder / name) for name in _FILES[1:3])
            template = folder / "chat_template.jinja"
            written = template.read_text(encoding="utf-8") if template.is_file() else settings.get("chat_template")
        except (OSError, ValueError) as error:
            raise TokenizerUnavailableError(
                f"no tokenizer can be loaded from {os.fspath(model)!r} ({error}): name a folder that holds the model's "
                "tokenizer.json, or a name of the hub"
            ) from error
        self.sha256 = hashlib.sha256(tokenizer.encode()).hexdigest()
        self._tokenizer = _loaded(tokenizer)
        added = self._tokenizer.get_added_tokens_decoder().values()
        shown = _default_template(written) or ""
        control = {token.content for token in added if token.special or token.content in shown}
        self._control_tokens = frozenset(control.union(_special_tokens({**marks, **settings}).values()))

    def num_tokens(self, text: str) -> int:
        """Return the number of tokens of a document in a prompt, where its control tokens are split up."""
        (shown,), _ = escape_documents(self._control_tokens, [{"role": "user", "content": text}], [("", text)])
        return len(self._tokenizer.encode(shown["content"], add_special_tokens=False).ids)


def _loaded(tokenizer: str) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise TokenizerUnavailableError(
            "tokens are counted by the package tokenizers: pip install 'ragcache[retrieval]'"
        ) from error
    try:
        made = Tokenizer.from_str(tokenizer)
    except Exception as error:  # of the Rust library: no narrower class
        raise TokenizerUnavailableError(
            f"the tokenizer cannot be loaded ({error}): name a folder that holds the model's tokenizer.json, or a name "
            "of the hub"
        ) from error
    made.no_truncation()
    made.no_padding()
    return made


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(_FILES)))
    except Exception as error:  # of the hub, of its cache, of the network
        raise TokenizerUnavailableError(
            f"no tokenizer can be loaded from {name!r}, which is no folder here and not at hand from the hub "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}): name "
            "a folder that holds the model's tokenizer.json"
        ) from error


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} holds no JSON object")  # noqa: TRY004 (of the file, not of a caller)
    return value


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens in a tokenizer's settings, each a text or ``{"content": text}``."""
    found = {}
    for name, value in settings.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _default_template(written: object) -> str | None:
    """Return the default one of a model's named chat templates."""
    if isinstance(written, list):
        written = {entry.get("name"): entry.get("template") for entry in written if isinstance(entry, dict)}
        written = written.get("default")
    return written if isinstance(written, str) else None
