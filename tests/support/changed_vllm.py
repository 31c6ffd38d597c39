"""A vLLM that differs from the installed one in a few lines: a folder to put first in ``PYTHONPATH``."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path


def changed_vllm(folder: Path, changes: dict[str, tuple[str, str]]) -> Path:
    """Link the installed vLLM into ``folder``, which is returned, but for some files.

    ``changes`` has a text of each, and what stands in its place.
    """
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    _link(
        Path(spec.submodule_search_locations[0]), folder / "vllm", {Path(name): text for name, text in changes.items()}
    )
    return folder


def _link(source: Path, target: Path, changes: dict[Path, tuple[str, str]]) -> None:
    target.mkdir(parents=True)
    for entry in source.iterdir():
        inside = {name.relative_to(entry.name): text for name, text in changes.items() if name.parts[0] == entry.name}
        if entry.is_dir() and inside:
            _link(entry, target / entry.name, inside)
        elif inside:
            has, gets = inside[Path()]
            text = entry.read_text(encoding="utf-8")
            assert has in text, f"{entry} has no {has!r}"
            (target / entry.name).write_text(text.replace(has, gets), encoding="utf-8")
        elif entry.name != "__pycache__":
            (target / entry.name).symlink_to(entry)
