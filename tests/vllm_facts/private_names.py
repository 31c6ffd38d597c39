"""Which names of vLLM that begin with an underscore RAGCache uses: ``python -m tests.vllm_facts.private_names``."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.conftest import ROOT

_PLUGIN = ROOT / "ragcache_core" / "vllm_plugin"
_OF_VLLM = {_PLUGIN / "compat.py"}
"""What it reaches into is vLLM's, also under names that we have elsewhere."""


def used_private_names() -> dict[str, set[str]]:
    """Return the names that no file of the plugin defines, or that ``compat`` reads: name -> files."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(_PLUGIN.rglob("*.py"))}
    ours = {name for tree in trees.values() for name in _defined(tree)}
    used: dict[str, set[str]] = {}
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Attribute)
                and _is_private(node.attr)
                and (path in _OF_VLLM or node.attr not in ours)
            ):
                used.setdefault(node.attr, set()).add(str(path.relative_to(_PLUGIN)))
    del used["_exit"]  # of the module os
    return used


def class_swaps() -> list[str]:
    """Return the files of the plugin that give an object another class, once for each place."""
    return [
        str(path.relative_to(_PLUGIN))
        for path in sorted(_PLUGIN.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Attribute) and target.attr == "__class__"
    ]


def _defined(tree: ast.Module) -> Iterator[str]:
    """Yield what is defined; a name that only gets a type is one of the class above."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                for part in ast.walk(target):
                    if isinstance(part, ast.Name):
                        yield part.id
                    elif (
                        isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == "self"
                    ):
                        yield part.attr


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


if __name__ == "__main__":
    for name, files in sorted(used_private_names().items()):
        print(f"{name:40}{', '.join(sorted(files))}")
