"""The names of vLLM's server arguments, read from its source: a misspelt one fails before vLLM is imported."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from ragcache_core.config import CacheConfig
from ragcache_core.errors import ConfigError

_SOURCES = ("engine/arg_utils.py", "entrypoints/launchers/cli_args.py", "entrypoints/openai/cli_args.py")
"""Where vLLM's releases define the arguments: as flags, and as fields of data classes."""
_FLAG = re.compile(r'"--([a-z][a-z0-9-]*)"')
_FIELD = re.compile(r"^    ([a-z]\w*)\s*:", re.MULTILINE)
_PLATFORM_PLUGINS = "vllm.platform_plugins"
"""Packages that may add arguments of their own."""


def check_names(names: Iterable[str], extra_args: Sequence[str], own: Collection[str]) -> None:
    """Reject settings that vLLM's server does not have.

    Nothing is rejected where the names are unknown, or where a platform plugin may add some.

    Args:
        names: settings as keyword arguments, ``max_model_len``.
        extra_args: raw arguments, ``--max-model-len``.
        own: the settings of ``launch`` itself, for the hint.

    Raises:
        ConfigError: with the nearest name.
    """
    known = _known_names()
    if not known:
        return
    for name in names:
        if not _is_known(name.replace("_", "-"), known):
            candidates = {flag.replace("-", "_") for flag in known} | set(own)
            raise ConfigError(
                f"{name} is neither a setting of launch() nor an argument of vLLM's server: {_hint(name, candidates)}"
            )
    for argument in extra_args:
        flag = argument.split("=")[0].split(".")[0].replace("_", "-")  # --compilation-config.mode=3
        if flag.startswith("--") and flag != "--" and not _is_known(flag[2:], known):
            hint = _hint(flag[2:].replace("-", "_"), {name.replace("-", "_") for name in known}, is_flag=True)
            raise ConfigError(f"{flag} is no argument of vLLM's server: {hint}")


@cache
def _known_names() -> frozenset[str]:
    """Return the names of all arguments, with some that are none; nothing where they are not known for certain."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None or entry_points(group=_PLATFORM_PLUGINS):
        return frozenset()
    known = set[str]()
    for source in _SOURCES:
        path = Path(spec.origin).parent / source
        if path.is_file():
            text = path.read_text(encoding="utf-8")
            known |= {*_FLAG.findall(text), *(name.replace("_", "-") for name in _FIELD.findall(text))}
    return frozenset(known) if "max-model-len" in known and "chat-template" in known else frozenset()


def _is_known(name: str, known: Collection[str]) -> bool:
    """Return whether vLLM's parser takes a name: as it is, negated, or as the beginning of a longer one."""
    return any(each.startswith((name, name.removeprefix("no-"))) for each in known)


def _hint(name: str, candidates: Collection[str], *, is_flag: bool = False) -> str:
    abbreviated = [field for field in CacheConfig.model_fields if field.startswith(name.removeprefix("cache_"))]
    nearest = abbreviated or get_close_matches(name, {*candidates, *CacheConfig.model_fields}, n=1)
    if not nearest:
        return "leave it out, or look its name up in vLLM's documentation"
    found = nearest[0]
    question = f"did you mean {'--' + found.replace('_', '-') if is_flag else found}?"
    if found in candidates:
        return question
    how = f"{'give it before --, or ' if is_flag else ''}pass cache=CacheConfig({found}=...)"
    return how if found == name else f"{question} {how}"
