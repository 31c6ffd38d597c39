"""The house: imports run one way, only the plugin imports vLLM, and what is public is documented."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import subprocess
import sys
from collections.abc import Iterable, Set
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import ragcache_core
from ragcache_core import errors
from tests.support.scripted_server import ScriptedServer

ROOT = Path(__file__).resolve().parents[3]

WORDS = ["_version", "types", "errors", "log", "memory", "private_files", "config", "stats", "wire", "prompt"]
LAYERS: dict[str, list[str]] = {
    "words": [f"ragcache_core.{name}" for name in WORDS],
    "algorithms": [
        f"ragcache_core.{name}"
        for name in ("policy", "tree", "chunk", "queueing", "ordering", "deadline", "swaps", "speculation", "routing")
    ]
    + ["ragcache_core.batch_order"],
    "recognition": ["ragcache_core.recognition"],
    "simulation": ["ragcache_core.sim"],
    "machine": [
        f"ragcache_core.{name}" for name in ("chunkstore", "ingest", "retrieval", "answers", "runtime", "profiles")
    ],
    "client": ["ragcache_core.client"],
    "integrations' core": ["ragcache_integrations.rag"],
    "integrations": ["ragcache_integrations.langchain", "ragcache_integrations.llamaindex"],
    "top": [f"ragcache_core.{name}" for name in ("cli", "bench", "quality", "reports")],
}
"""Folders from the ground up; one imports its own floor and those below."""

FOREIGN: dict[str, list[str]] = {
    "words": ["numpy", "faiss", "httpx", "openai", "transformers"],
    "algorithms": ["numpy", "faiss", "httpx", "openai", "transformers"],
    "recognition": ["faiss", "httpx", "openai", "transformers", "pydantic"],
    "simulation": ["faiss", "httpx", "openai", "transformers"],
    "machine": ["httpx", "openai", "transformers", "langchain_core", "llama_index"],
    "client": ["faiss", "sklearn", "scipy", "transformers", "langchain_core", "llama_index"],
    "integrations' core": ["faiss", "sklearn", "scipy", "transformers", "langchain_core", "llama_index"],
    "integrations": ["faiss", "sklearn", "scipy", "transformers"],
    "top": [],
}
"""Packages that a floor works without."""

_BLOCKED = """
import importlib, importlib.abc, sys
blocked, modules = {blocked!r}, {modules!r}
class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if any(name == b or name.startswith(b + '.') for b in blocked):
            raise ImportError(f'{{name}} is above this floor')
sys.meta_path.insert(0, Blocker())
for module in modules:
    importlib.import_module(module)
"""


# What the integrations work without, make test-install looks at: an environment without it.
@pytest.mark.parametrize("floor", [floor for floor in LAYERS if floor != "integrations"])
def test_a_floor_imports_with_everything_above_it_blocked(floor: str) -> None:
    names = list(LAYERS)
    above = [folder for name in names[names.index(floor) + 1 :] for folder in LAYERS[name]]
    blocked = [*above, *FOREIGN[floor], "vllm", "torch", "ragcache_core.vllm_plugin"]
    if floor == "top":
        blocked = ["vllm", "torch"]
    modules = [name for folder in LAYERS[floor] for name in _modules(folder)]
    code = _BLOCKED.format(blocked=blocked, modules=modules)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("floor", LAYERS)
def test_a_layer_imports_nothing_above_it_nor_what_it_works_without(floor: str) -> None:
    names = list(LAYERS)
    above = [folder for name in names[names.index(floor) + 1 :] for folder in LAYERS[name]]
    blocked = (*above, *FOREIGN[floor], "vllm", "torch", "ragcache_core.vllm_plugin")
    for module in [name for folder in LAYERS[floor] for name in _modules(folder)]:
        found = {name for name in _loaded_with(module) if any(name == b or name.startswith(f"{b}.") for b in blocked)}
        assert not found, module


@cache
def _loaded_with(module: str) -> Set[str]:
    """Return all modules that are imported with one of ours; of others only those that ours name."""
    loaded, left = {module}, [module]
    while left:
        name = left.pop()
        parents = {name.rsplit(".", i)[0] for i in range(1, name.count(".") + 1)}
        for each in (_imported_at_once_by(name) | parents) - loaded:
            loaded.add(each)
            left.append(each)
    return loaded


@cache
def _imported_at_once_by(module: str) -> Set[str]:
    source = ROOT / Path(*module.split("."))
    path = source / "__init__.py" if source.is_dir() else source.with_suffix(".py")
    if not path.is_file():  # of others, or a name in a module
        return frozenset()
    return _read(path).at_once


def _modules(name: str) -> list[str]:
    """Return the name of a module, or of a package and all that it holds."""
    source = ROOT / Path(*name.split("."))
    if not source.is_dir():
        return [name]
    return sorted(_name(path) for path in source.rglob("*.py") if path.name != "__main__.py")


def _name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@dataclass(frozen=True)
class _Source:
    """What the tests ask of a file."""

    imports: Set[str]
    """The modules that it imports, wherever in it; of ``from package import name`` both readings."""
    at_once: Set[str]
    """Those that are imported when it is, and not only for its types."""
    classes: list[str]
    docstring: str | None


@cache
def _read(path: Path) -> _Source:
    """Parse a file once: its tree is large, and all tests together parse 400 files."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    return _Source(_imported(ast.walk(tree)), _imported_at_once(tree.body), classes, ast.get_docstring(tree))


def _imports(path: Path) -> Set[str]:
    return _read(path).imports


def _imported(nodes: Iterable[ast.AST]) -> set[str]:
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def _imported_at_once(body: Iterable[ast.stmt]) -> set[str]:
    """Return the modules that are imported when a file is, and not only for its types."""
    found = _imported(body)
    for node in body:
        if isinstance(node, ast.Try | ast.If) and "TYPE_CHECKING" not in ast.unparse(node):
            found |= _imported_at_once(node.body)
    return found


SOURCES = sorted(
    p
    for folder in ("ragcache_core", "ragcache_integrations", "kernels", "examples")
    for p in (ROOT / folder).rglob("*.py")
)


def test_only_the_plugin_imports_vllm_and_nothing_imports_the_plugin() -> None:
    for path in SOURCES:
        if "vllm_plugin" not in path.parts:
            plugins = ("vllm.", "ragcache_core.vllm_plugin")
            assert not {name for name in _imports(path) if name == "vllm" or name.startswith(plugins)}, path


def test_a_unit_test_imports_no_vllm() -> None:
    """Which takes each process of the tests as long as all else that it imports: such a test is one of tests/engine."""
    for folder in ("tests/unit", "tests/contracts"):
        for path in (ROOT / folder).rglob("*.py"):
            loaded = {name for each in _read(path).at_once for name in _loaded_with(each)}
            assert not {name for name in loaded if name.split(".")[0] == "vllm"}, path


def test_the_plugin_takes_nothing_of_the_client_and_the_product_nothing_of_the_tests() -> None:
    for path in SOURCES:
        if "examples" not in path.parts:
            assert not {name for name in _imports(path) if name.split(".")[0] == "tests"}, path
        if "vllm_plugin" in path.parts:
            above = (*LAYERS["client"], *LAYERS["top"], "ragcache_integrations")
            assert not {name for name in _imports(path) if name.startswith(above)}, path


def test_no_imports_go_in_circles() -> None:
    graph = {_name(path): _read(path).at_once for path in SOURCES}
    order = TopologicalSorter({name: imported & graph.keys() - {name} for name, imported in graph.items()})
    order.prepare()  # raises CycleError, with the circle


def test_no_class_name_is_used_twice() -> None:
    """But one of each framework's integration, where applications import it by the framework."""
    named: dict[str, list[str]] = {}
    for path in SOURCES + sorted((ROOT / "benchmarks").rglob("*.py")):
        if "examples" not in path.parts:
            for name in _read(path).classes:
                named.setdefault(name, []).append(_name(path))
    twice = {name: homes for name, homes in named.items() if len(homes) > 1}
    assert twice.pop("RAGCacheRetriever") == [
        "ragcache_integrations.langchain.retriever",
        "ragcache_integrations.llamaindex.retriever",
    ]
    assert twice == {}


def test_unpickling_happens_nowhere() -> None:
    for path in SOURCES:
        assert not {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"} & _imports(path), path
        assert "allow_pickle=True" not in path.read_text(encoding="utf-8"), path


_OF_RETRIEVAL = {
    *("DocumentStore", "Embedder", "IndexOptions", "LangChainEmbedder", "LlamaIndexEmbedder", "MiniLMEmbedder"),
    *("PrecomputedEmbedder", "StageSource", "StoreStats", "TfidfSvdEmbedder", "TrainableEmbedder"),
    *("GrowingEffort", "MMR", "as_embedder", "as_source", "lancedb_stages", "one_stage"),
    *("pgvector_stages", "qdrant_stages"),
}
PUBLIC: dict[str, set[str]] = {
    "ragcache_core": {
        *(name for name, value in vars(errors).items() if name.endswith("Error") and isinstance(value, type)),
        *("Arrangement", "BoundPrompt", "CacheConfig", "ChunkReuse", "ChunkReuseStats", "ChunkStats"),
        "DeadlineReport",
        *("Document", "DocumentOrder", "DocumentStats", "DocumentUse", "Engine", "EngineStats", "Fleet"),
        "ForgetReceipt",
        *("Generation", "GenerationChunk", "PipelineReport", "PromptLayout", "PromptSegment"),
        *("RenderedPrompt", "RequestStats", "RetrievalUpdate", "SegmentKind", "TierStats", "VLLMOffload"),
        *("__version__", "ragcache_deployment", "request_stats_from_dict", *_OF_RETRIEVAL),
    },
    "ragcache_core.client": {
        *("Engine", "EngineClient", "Fleet", "Generation", "GenerationChunk", "RequestPlan"),
        "translate_errors",
    },
    "ragcache_core.retrieval": _OF_RETRIEVAL,
    "ragcache_integrations.langchain": {
        *("CacheStatsCallbackHandler", "CacheSummary", "ChatRAGCache", "DocumentHits", "RAGCacheRetriever"),
        *("SemanticAnswerCache", "SpeculativeRAG", "StagedFAISS", "TfidfSvdEmbeddings", "TraceCallbackHandler"),
        *("format_documents", "prompt_from_layout", "to_core", "to_langchain"),
    },
    "ragcache_integrations.llamaindex": {
        *("AnswerCache", "CacheStatsEvent", "CacheStatsEventHandler", "CacheSummary", "DocumentHits"),
        *("CachedAnswerEvent", "RAGCacheLLM", "RAGCacheQueryEngine", "RAGCacheRetriever"),
        *("RetrievalStageEvent", "SpeculationEvent", "StagedFAISSVectorStore", "TfidfSvdEmbedding"),
        *("TraceEventHandler", "document_from_node", "node_from_document"),
    },
}
"""The names that users may rely on. Removing one is a breaking change; adding one belongs in the CHANGELOG."""


ENGINE = {
    *("launch", "alaunch", "connect", "aconnect", "drain", "close", "aclose", "pid", "log_path", "num_restarts"),
    *("model", "base_url", "api_key", "max_model_len", "http_client", "http_async_client"),
    *("batch", "abatch", "generate", "agenerate", "stream", "astream", "stats", "astats", "forget", "aforget"),
    *("warm", "awarm", "warm_paths", "prefetch", "aprefetch", "cache", "register", "register_in_background"),
    *("tokenizer", "tokenize", "bind_prompt", "remember_documents", "arrange_documents"),
    "integration",
}
"""What an engine shows: what applications use, and one object with what the frameworks' integrations use."""


@pytest.mark.parametrize("name", PUBLIC)
def test_a_package_exports_exactly_its_public_names(name: str) -> None:
    module = importlib.import_module(name)
    assert set(module.__all__) == PUBLIC[name]
    assert all(hasattr(module, exported) for exported in module.__all__)


@pytest.mark.parametrize(
    "name", ["ragcache_core", "ragcache_integrations.langchain", "ragcache_integrations.llamaindex"]
)
def test_an_export_that_is_imported_late_is_where_type_checkers_see_it(name: str) -> None:
    module = importlib.import_module(name)
    tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: part.module for part in block.body if isinstance(part, ast.ImportFrom) for alias in part.names}
    (call,) = [node for node in ast.walk(block) if isinstance(node, ast.Call) and node.args]
    late = {export: home for home, exports in ast.literal_eval(call.args[1]).items() for export in exports}
    assert late == seen
    at_once = {alias.name for part in tree.body if isinstance(part, ast.ImportFrom) for alias in part.names}
    assert late.keys() == set(module.__all__) - at_once
    assert set(module.__all__) <= set(dir(module))
    with pytest.raises(AttributeError, match=f"{name}.*no attribute 'Nothing'"):
        module.Nothing  # noqa: B018


def test_an_engine_shows_exactly_its_public_names() -> None:
    with ScriptedServer() as server, ragcache_core.Engine.connect(server.url, tokenizer=False) as engine:
        assert {name for name in dir(engine) if not name.startswith("_")} == ENGINE


def test_the_core_is_imported_and_an_error_named_without_any_package_of_others() -> None:
    foreign = ["torch", "vllm", "faiss", "httpx", "openai", "pydantic", "numpy", "langchain_core", "llama_index"]
    code = _BLOCKED.format(blocked=foreign, modules=["ragcache_core"])
    code += "from ragcache_core import Document, RAGCacheError\nassert 'ragcache_core.client' not in sys.modules\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


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


def test_every_module_imports_and_reports_what_it_is() -> None:
    for info in pkgutil.walk_packages(ragcache_core.__path__, "ragcache_core."):
        source = ROOT / Path(*info.name.split("."))
        path = source / "__init__.py" if info.ispkg else source.with_suffix(".py")
        assert _read(path).docstring, info.name


def test_the_version_is_set_in_one_place() -> None:
    from importlib.metadata import version

    assert version("ragcache") == ragcache_core.__version__
    assert f'"{ragcache_core.__version__}"' not in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
