"""The house: imports run one way, only the plugin imports vLLM, and what is public is documented."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import hypothesis
import pytest

import ragcache_core

ROOT = Path(__file__).resolve().parents[3]

WORDS = ["_version", "types", "errors", "memory", "private_files", "config", "stats", "wire", "prompt"]
FLOORS: dict[str, list[str]] = {
    "words": [f"ragcache_core.{name}" for name in WORDS],
    "algorithms": [
        f"ragcache_core.{name}" for name in ("policy", "tree", "chunk", "queueing", "ordering", "speculation")
    ],
    "simulation": ["ragcache_core.sim"],
    "matter": ["ragcache_core.chunkstore", "ragcache_core.ingest", "ragcache_core.retrieval"],
    "client": ["ragcache_core.client"],
    "integrations": ["ragcache_integrations.langchain", "ragcache_integrations.llamaindex"],
    "top": ["ragcache_core.cli", "ragcache_core.bench"],
}
"""Rooms from the ground up; a room imports its own floor and those below."""

FOREIGN: dict[str, list[str]] = {
    "words": ["numpy", "faiss", "httpx", "openai", "transformers"],
    "algorithms": ["numpy", "faiss", "httpx", "openai", "transformers"],
    "simulation": ["faiss", "httpx", "openai", "transformers"],
    "matter": ["httpx", "openai", "transformers", "langchain_core", "llama_index"],
    "client": ["faiss", "sklearn", "scipy", "numba", "transformers", "langchain_core", "llama_index"],
    "integrations": ["faiss", "sklearn", "scipy", "numba", "transformers"],
    "top": [],
}
"""Packages that a floor works without."""

_BLOCKED = """
import importlib, importlib.abc, sys
blocked, rooms = {blocked!r}, {rooms!r}
class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if any(name == b or name.startswith(b + '.') for b in blocked):
            raise ImportError(f'{{name}} is above this floor')
sys.meta_path.insert(0, Blocker())
for room in rooms:
    importlib.import_module(room)
"""


@pytest.mark.parametrize("floor", FLOORS)
def test_a_floor_imports_with_everything_above_it_blocked(floor: str) -> None:
    names = list(FLOORS)
    above = [room for name in names[names.index(floor) + 1 :] for room in FLOORS[name]]
    blocked = [*above, *FOREIGN[floor], "vllm", "torch", "ragcache_core.vllm_plugin"]
    if floor == "top":
        blocked = ["vllm", "torch"]
    if floor == "integrations":  # the frameworks may import torch where it is installed; we do not
        blocked.remove("torch")
    rooms = FLOORS[floor]
    code = _BLOCKED.format(blocked=blocked, rooms=rooms)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def _imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module)
    return found


SOURCES = sorted(
    p
    for folder in ("ragcache_core", "ragcache_integrations", "kernels", "examples")
    for p in (ROOT / folder).rglob("*.py")
)


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_only_the_plugin_imports_vllm_and_nothing_imports_the_plugin(path: Path) -> None:
    if "vllm_plugin" in path.parts:
        return
    imported = _imports(path)
    assert not {name for name in imported if name == "vllm" or name.startswith("vllm.")}
    assert not {name for name in imported if name.startswith("ragcache_core.vllm_plugin")}


def test_unpickling_happens_nowhere() -> None:
    for path in SOURCES:
        assert not {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"} & _imports(path), path
        assert "allow_pickle=True" not in path.read_text(encoding="utf-8"), path


PUBLIC: dict[str, set[str]] = {
    "ragcache_core": {
        *("CacheConfig", "ChunkReuse", "ChunkReuseStats", "ChunkStats"),
        *("Document", "DocumentStats", "DocumentUse", "EngineStats", "PromptLayout", "PromptSegment"),
        *("RenderedPrompt", "RequestStats", "RetrievalUpdate", "SegmentKind", "TierStats", "__version__"),
    },
    "ragcache_core.client": {
        *("Engine", "Generation", "GenerationChunk", "ModelTokenizer", "RequestPlan", "translate_errors"),
    },
    "ragcache_core.retrieval": {
        *("DocumentStore", "Embedder", "IndexOptions", "LangChainEmbedder", "LlamaIndexEmbedder", "MiniLMEmbedder"),
        *("PrecomputedEmbedder", "ShardedStore", "StageSource", "StoreStats", "TfidfSvdEmbedder", "TrainableEmbedder"),
        *("as_embedder", "as_source", "one_stage"),
    },
    "ragcache_integrations.langchain": {
        *("CacheStatsCallbackHandler", "CacheSummary", "ChatRAGCache", "DocumentHits", "RAGCacheRetriever"),
        *("SpeculativeRAG", "StagedFAISS", "TfidfSvdEmbeddings", "format_documents", "prompt_from_layout", "to_core"),
        *("TraceCallbackHandler", "to_langchain"),
    },
    "ragcache_integrations.llamaindex": {
        *("CacheStatsEvent", "CacheStatsEventHandler", "CacheSummary", "DocumentHits"),
        *("RAGCacheLLM", "RAGCacheQueryEngine", "RAGCacheRetriever"),
        *("RetrievalStageEvent", "SpeculationEvent", "StagedFAISSVectorStore", "TfidfSvdEmbedding"),
        *("TraceEventHandler", "document_from_node", "node_from_document"),
    },
}
"""The names that users may rely on. Removing one is a breaking change; adding one belongs in the CHANGELOG."""


@pytest.mark.parametrize("name", PUBLIC)
def test_a_package_exports_exactly_its_public_names(name: str) -> None:
    module = importlib.import_module(name)
    assert set(module.__all__) == PUBLIC[name]
    assert all(hasattr(module, exported) for exported in module.__all__)


@pytest.mark.parametrize("name", PUBLIC)
def test_what_is_public_has_a_docstring(name: str) -> None:
    module = importlib.import_module(name)
    undocumented = []
    for exported in module.__all__:
        value = getattr(module, exported)
        if not (inspect.isclass(value) or inspect.isfunction(value)):
            continue
        own = vars(value).items() if inspect.isclass(value) else ()
        members = {m: getattr(value, m) for m, x in own if not m.startswith(("_", "model_")) and _is_documentable(x)}
        undocumented += [f"{exported}.{m}" for m, x in members.items() if not inspect.getdoc(x)]
        undocumented += [] if inspect.getdoc(value) else [exported]
    assert undocumented == []


def _is_documentable(member: object) -> bool:
    return inspect.isfunction(member) or isinstance(member, property | classmethod | staticmethod)


def test_every_module_imports_and_says_what_it_is() -> None:
    for info in pkgutil.walk_packages(ragcache_core.__path__, "ragcache_core."):
        source = ROOT / Path(*info.name.split("."))
        path = source / "__init__.py" if info.ispkg else source.with_suffix(".py")
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), info.name


def test_the_version_is_set_in_one_place() -> None:
    from importlib.metadata import version

    assert version("ragcache") == ragcache_core.__version__
    assert f'"{ragcache_core.__version__}"' not in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_the_kernel_shelf_does_not_shadow_the_package_called_kernels() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert importlib.util.find_spec("ragcache_kernels") is not None


def test_random_tests_try_the_same_examples_in_every_run_where_ci_is_set() -> None:
    settings = hypothesis.settings()
    assert settings.derandomize == bool(os.environ.get("CI"))
    assert settings.print_blob
    assert 'export CI="${CI:-true}"' in (ROOT / ".ci" / "run").read_text()
