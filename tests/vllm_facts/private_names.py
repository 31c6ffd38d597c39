"""Which names of vLLM that begin with an underscore RAGCache uses: ``python -m tests.vllm_facts.private_names``.

A name counts as RAGCache's only where the object it is asked of is known to be RAGCache's and vLLM gives that object no
such name. What is not known counts as vLLM's. Names that are put together while the program runs are not seen.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.conftest import ROOT

_PLUGIN = ROOT / "ragcache_core" / "vllm_plugin"
_OURS = "ragcache_core"
_LISTS_THEM = "facts.py"  # whose strings are the names that an engine checks
_OF_OTHERS = {"_name_or_path"}  # a field of the configuration that transformers writes
_PRIVATE = re.compile(r"_[A-Za-z]\w*")


def sources() -> dict[str, str]:
    """Return the plugin's files: path below the plugin's folder -> text."""
    return {str(path.relative_to(_PLUGIN)): path.read_text(encoding="utf-8") for path in sorted(_PLUGIN.rglob("*.py"))}


def used_private_names(texts: Mapping[str, str]) -> dict[str, set[str]]:
    """Return the private names of vLLM that the plugin reads, overrides or imports: name -> files.

    Args:
        texts: the plugin's files, as from :func:`sources`. A class is looked up by its name in the imported module.
    """
    trees = {path: ast.parse(text) for path, text in texts.items()}
    defined: dict[tuple[str, str], set[str]] = {}
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                defined.setdefault((_module_name(path), node.name), set()).update(_defined(node))
    owners = _Owners(defined, {each for path in texts for each in _classes_of(import_module(_module_name(path)))})
    used: dict[str, set[str]] = {}
    for path, tree in trees.items():
        reader = _Reader(owners, import_module(_module_name(path)), has_strings=path != _LISTS_THEM)
        reader.visit(tree)
        for name in reader.found - _OF_OTHERS:
            used.setdefault(name, set()).add(path)
    return used


def with_every_kind_of_use(texts: Mapping[str, str]) -> tuple[dict[str, str], set[str]]:
    """Return the plugin's files with one more use of each kind, and the names that these use."""
    scheduler, rows = "scheduler/scheduler.py", "chunks/compute/scattered_attention.py"
    changed = dict(texts)
    changed[scheduler] = texts[scheduler].replace(
        "    def _preempt_request(",
        """    def _update_requests_with_invalid_blocks(self): ...

    def _own(self, request):
        self._worker_bytes, request._journal, super()._free_blocks(), self.kv_cache_manager._index

    def _preempt_request(""",
    )
    changed[rows] = texts[rows].replace("rows._warm_up()", "rows._warm_up(layers._at_s, rows._kv_config)")
    changed["compat.py"] += """
import vllm._aiter_ops
from vllm._version import version
from vllm.v1.core.sched.utils import _has_repeating_pattern
import_module("vllm._tilelang_ops")
kv_cache_utils._gen_mm_extra_hash_keys, EngineCore._finish_pause
getattr(stats, "_restore"), setattr(stats, "_thread", 1), operator.attrgetter("_started")(stats)
"""
    assert all(changed[path] != texts[path] for path in (scheduler, rows))
    return changed, {
        *("_update_requests_with_invalid_blocks", "_worker_bytes", "_journal", "_free_blocks", "_index"),
        *("_at_s", "_kv_config", "_aiter_ops", "_version", "_has_repeating_pattern", "_tilelang_ops"),
        *("_gen_mm_extra_hash_keys", "_finish_pause", "_restore", "_thread", "_started"),
    }


def class_swaps(texts: Mapping[str, str]) -> list[str]:
    """Return the files that give an object another class, or that have the name of ``__class__`` as a string."""
    return [
        path
        for path, text in texts.items()
        for node in ast.walk(ast.parse(text))
        if (isinstance(node, ast.Attribute) and node.attr == "__class__" and not isinstance(node.ctx, ast.Load))
        or (isinstance(node, ast.Constant) and node.value == "__class__")
    ]


def _module_name(path: str) -> str:
    parts = [_OURS, _PLUGIN.name, *Path(path).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _classes_of(module: ModuleType) -> Iterator[type]:
    for value in vars(module).values():
        if isinstance(value, type) and value.__module__.startswith(_OURS):
            yield value


class _Owners:
    """Whose a private name of an object is.

    Args:
        defined: module and name of each class of RAGCache -> what its text defines.
        classes: RAGCache's classes, as imported.
    """

    def __init__(self, defined: Mapping[tuple[str, str], set[str]], classes: set[type]) -> None:
        self._defined = defined
        self._above = {each: {above for below in classes if each in below.__mro__ for above in below.__mro__}
                       for each in classes}  # fmt: skip
        self._of_vllm: dict[type, set[str]] = {}

    def theirs(self, cls: type) -> set[str]:
        """Return the private names that vLLM's classes give an object of this class, or of one below it."""
        above = [each for each in self._above.get(cls, cls.__mro__) if each.__module__.split(".")[0] == "vllm"]
        return set().union(*(self._names_of_vllm(each) for each in above))

    def is_ours(self, cls: Any, name: str) -> bool:
        """Return whether only RAGCache's classes give such an object this name."""
        if not isinstance(cls, type):
            return False
        ours = (self._defined.get((each.__module__, each.__name__), set()) for each in self._above.get(cls, ()))
        return name not in self.theirs(cls) and any(name in each for each in ours)

    def _names_of_vllm(self, cls: type) -> set[str]:
        if cls not in self._of_vllm:
            text = inspect.getsource(cls)
            self._of_vllm[cls] = {
                *vars(cls),
                *getattr(cls, "__annotations__", {}),
                *re.findall(r"\bself\.(_\w+)", text),
            }
        return self._of_vllm[cls]


class _Reader(ast.NodeVisitor):
    """Finds the private names in a file that are not RAGCache's."""

    def __init__(self, owners: _Owners, module: ModuleType, *, has_strings: bool) -> None:
        self.found: set[str] = set()
        self._owners = owners
        self._module = module
        self._has_strings = has_strings
        self._classes: list[Any] = []
        self._functions: list[ast.AST] = []

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._classes.append(getattr(self._module, node.name, None))
        if isinstance(self._classes[-1], type):
            self.found |= {name for name in _defined(node) if _is_private(name)} & self._owners.theirs(
                self._classes[-1]
            )
        self.generic_visit(node)
        self._classes.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._functions.append(node)
        self.generic_visit(node)
        self._functions.pop()

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if _is_private(node.attr) and not self._is_ours(node.value, node.attr):
            self.found.add(node.attr)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        text = node.value
        if self._has_strings and isinstance(text, str):
            if _is_private(text):
                self.found.add(text)
            elif re.fullmatch(r"vllm(\.\w+)+", text):
                self.found |= {part for part in text.split(".") if _is_private(part)}

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id == "TypeVar":
            return
        if isinstance(node.func, ast.Name) and node.func.id in ("getattr", "setattr", "hasattr", "delattr"):
            receiver, name = node.args[:2]
            if isinstance(name, ast.Constant) and self._is_ours(receiver, str(name.value)):
                node = ast.Call(node.func, [receiver, *node.args[2:]], node.keywords)
        self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        for part in node.values:
            if not isinstance(part, ast.Constant):
                self.visit(part)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        parts = (node.module or "").split(".")
        if parts[0] == "vllm":
            self.found |= {name for name in (*parts, *(alias.name for alias in node.names)) if _is_private(name)}

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            parts = alias.name.split(".")
            if parts[0] == "vllm":
                self.found |= {name for name in parts if _is_private(name)}

    def _is_ours(self, receiver: ast.expr, name: str) -> bool:
        """Return whether a private name of what an expression gives is RAGCache's."""
        if isinstance(receiver, ast.Name) and not self._is_local(receiver.id):
            value = getattr(self._module, receiver.id, None)
            if isinstance(value, ModuleType):
                return value.__name__.split(".")[0] != "vllm"
            return self._owners.is_ours(value, name)
        return any(self._owners.is_ours(cls, name) for cls in self._types_of(receiver))

    def _is_local(self, name: str) -> bool:
        return any(
            (isinstance(node, ast.arg) and node.arg == name)
            or (isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store))
            for function in self._functions
            for node in ast.walk(function)
        )

    def _types_of(self, receiver: ast.expr) -> Iterator[Any]:
        """Yield the classes that an expression is known to be of."""
        if isinstance(receiver, ast.Call):
            made = receiver.func
            if isinstance(made, ast.Attribute) and made.attr == "__new__":  # super().__new__(cls)
                made = receiver.args[0]
            if isinstance(made, ast.Name) and made.id in ("super", "cls"):
                yield from self._classes[-1:]
            elif isinstance(made, ast.Name):
                yield getattr(self._module, made.id, None)
        elif isinstance(receiver, ast.Name) and receiver.id in ("self", "cls"):
            yield from self._classes[-1:]
        elif isinstance(receiver, ast.Name) and self._functions:
            for node in ast.walk(self._functions[-1]):
                if isinstance(node, ast.Assign) and [ast.unparse(each) for each in node.targets] == [receiver.id]:
                    if isinstance(node.value, ast.Call):
                        yield from self._types_of(node.value)
                elif (
                    isinstance(node, ast.Assert)
                    and isinstance(node.test, ast.Call)
                    and ast.unparse(node.test).startswith(f"isinstance({receiver.id}, ")
                ):
                    yield getattr(self._module, ast.unparse(node.test.args[1]), None)


def _defined(cls: ast.ClassDef) -> set[str]:
    """Return what a class defines; a name that only gets a type is one of the class above."""
    found = set()
    for node in ast.walk(cls):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            is_own = isinstance(node, ast.Name) or ast.unparse(node.value) in ("self", "cls")
            found |= {node.id if isinstance(node, ast.Name) else node.attr} if is_own else set()
    typed = {ast.unparse(node.target) for node in cls.body if isinstance(node, ast.AnnAssign) and node.value is None}
    return found - typed


def _is_private(name: str) -> bool:
    return _PRIVATE.fullmatch(name) is not None


if __name__ == "__main__":
    for name, files in sorted(used_private_names(sources()).items()):
        print(f"{name:40}{', '.join(sorted(files))}")
