"""The client tokenises nothing: it asks the server, and imports no tokenizer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ragcache_core import Document, Fleet, PromptLayout
from ragcache_core.client import Engine
from ragcache_core.errors import ConfigError, PromptError, TokenizerUnavailableError
from ragcache_core.prompt import PromptDocument
from ragcache_core.types import SegmentKind
from tests.support.local_tokenizer import LocalTokenizer
from tests.support.scripted_server import THREE_TIERS, ScriptedServer

ROOT = Path(__file__).parents[3]
SUN = Document("sun", "The sun is a star, and every planet goes around it in its own time.")
MESSAGES = [{"role": "user", "content": f"{SUN.text}\n\nWho goes around it?"}]


def test_tokens_are_those_of_the_server(engine: Engine, demo_model: str) -> None:
    here = LocalTokenizer.of_model(demo_model)
    assert engine.tokenize(MESSAGES) == list(here.lay_out(MESSAGES, []).token_ids)
    assert engine.tokenize("Zorval") == list(here.encode("Zorval", add_special_tokens=True).token_ids)
    assert engine.tokenizer.encode("Zorval") == here.encode("Zorval")
    assert engine.tokenizer.control_tokens == here.control_tokens
    rendered = PromptLayout().render(engine.tokenizer, [SUN], "Why?")
    assert rendered == PromptLayout().render(here, [SUN], "Why?")
    assert [s.doc_id for s in rendered.segments if s.kind is SegmentKind.DOCUMENT] == ["sun"]


def test_a_chat_is_asked_about_once_while_it_is_kept(engine: Engine, server: ScriptedServer) -> None:
    one = engine.tokenizer.lay_out(MESSAGES, [PromptDocument("sun", SUN.text)])
    assert engine.tokenizer.lay_out(MESSAGES, [PromptDocument("sun", SUN.text)]) is one
    assert len(server.laid_out) == 1
    engine.tokenizer.lay_out(MESSAGES, [PromptDocument("sun", SUN.text)], settings={"tools": [{"type": "function"}]})
    assert len(server.laid_out) == 2


def test_a_chat_that_no_template_renders_is_a_prompt_error(engine: Engine) -> None:
    with pytest.raises(PromptError, match="cannot make a prompt"):
        engine.tokenizer.lay_out(
            [{"role": "assistant", "content": None, "tool_calls": [{"function": {"arguments": "{"}}]}], []
        )


def test_a_server_without_ragcache_is_asked_with_vllms_own_route_and_names_no_documents(
    server: ScriptedServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.finds_documents = False
    with Engine.connect(server.url, api_key="secret") as engine:
        engine.remember_documents([SUN])
        answer = engine.generate(MESSAGES, max_tokens=4)
        assert "kv_transfer_params" not in server.requests[-1].body
        assert answer.stats.documents == ()
        assert answer.stats.num_prompt_tokens > 0
        assert engine.tokenize(MESSAGES)
        rendered = PromptLayout().render(engine.tokenizer, [SUN], "Why?")
        assert rendered.token_ids
        assert not [s for s in rendered.segments if s.kind is SegmentKind.DOCUMENT]
    assert caplog.records == []


def test_a_server_that_cannot_find_documents_in_requests_is_asked_before(server: ScriptedServer) -> None:
    server.names_documents = False
    with Engine.connect(server.url, api_key="secret") as engine:
        engine.remember_documents([SUN])
        answer = engine.generate(MESSAGES, max_tokens=4)
        (asked,) = server.laid_out
        assert [document["id"] for document in asked["documents"]] == ["sun"]
        params = server.requests[-1].kv_transfer_params
        assert params["prompt_token_ids"] == engine.tokenize(MESSAGES)
        assert [document.doc_id for document in answer.stats.documents] == ["sun"]
        engine.generate([{"role": "user", "content": "No document."}], max_tokens=4)
        assert len(server.laid_out) == 2, "tokenize is the other one"


def test_a_server_that_reports_no_tokens_is_a_named_error() -> None:
    with ScriptedServer() as server, Engine.connect(server.url) as engine:
        assert engine.generate("Who?", max_tokens=2).text
        for ask in (lambda: engine.tokenize("Who?"), lambda: PromptLayout().render(engine.tokenizer, [SUN], "Why?")):
            with pytest.raises(TokenizerUnavailableError, match="does not report the tokens"):
                ask()


def test_a_client_side_tokenizer_is_rejected_at_every_entry(server: ScriptedServer, demo_model: str) -> None:
    langchain = pytest.importorskip("ragcache_integrations.langchain")
    llamaindex = pytest.importorskip("ragcache_integrations.llamaindex")
    entries = (
        lambda: Engine.connect(server.url, api_key="secret", tokenizer=demo_model),  # type: ignore[arg-type]
        lambda: Fleet.connect([server.url], api_key="secret", tokenizer=demo_model),  # type: ignore[arg-type]
        lambda: langchain.ChatRAGCache(base_url=server.base_url, api_key="secret", tokenizer=demo_model),
        lambda: llamaindex.RAGCacheLLM(api_base=server.base_url, api_key="secret", tokenizer=Path(demo_model)),
    )
    for entry in entries:
        with pytest.raises(ConfigError, match="leave it out"):
            entry()


def test_llamaindexs_own_tokenizer_objects_still_count_for_its_max_tokens(server: ScriptedServer) -> None:
    llamaindex = pytest.importorskip("ragcache_integrations.llamaindex")

    class Words:
        def encode(self, text: str) -> list[int]:
            return [len(word) for word in text.split()]

    llm = llamaindex.RAGCacheLLM(api_base=server.base_url, api_key="secret", tokenizer=Words())
    assert llm.tokenizer.encode("a bc") == [1, 2]
    assert llm.engine.tokenize("Zorval")
    llm.close()


HIDDEN = ("transformers", "torch", "faiss", "scipy", "sklearn", "tokenizers", "jinja2", "huggingface_hub")


def test_a_client_needs_none_of_the_packages_that_tokenise_or_search_stores(demo_model: str) -> None:
    code = f"""
import sys
for name in {HIDDEN!r}:
    sys.modules[name] = None
from ragcache_core import Document, PromptLayout
from ragcache_core.client import Engine
with Engine.connect(sys.argv[1], api_key="secret") as engine:
    engine.remember_documents([Document("sun", "The sun is a star.")])
    answer = engine.generate([{{"role": "user", "content": "The sun is a star. Why?"}}], max_tokens=2)
    print([document.doc_id for document in answer.stats.documents])
    print(len(engine.generate(PromptLayout().render(engine.tokenizer, [], "Why?"), max_tokens=2).text) > 0)
"""
    with ScriptedServer(root=demo_model, api_key="secret", cache=THREE_TIERS) as server:
        done = subprocess.run(
            [sys.executable, "-c", code, server.url], cwd=ROOT, capture_output=True, text=True, check=False
        )
    assert done.stdout.split("\n") == ["['sun']", "True", ""], done.stderr


@pytest.mark.parametrize("missing", ["faiss", "scipy"])
def test_a_store_without_its_extra_reports_what_to_install(missing: str, tmp_path: Path) -> None:
    code = f"""
import sys
sys.modules[{missing!r}] = None
from ragcache_core import Document
from ragcache_core.retrieval import DocumentStore
with DocumentStore.create({str(tmp_path / "store")!r}) as store:
    store.add([Document("a", "Zorval makes clocks.")])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert f"{missing} is not installed" in done.stderr.splitlines()[-1]
    assert 'pip install "ragcache[retrieval]"' in done.stderr.splitlines()[-1]
    assert (tmp_path / "store").exists() is (missing == "scipy")
