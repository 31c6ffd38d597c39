"""The client's tokenizer: the ids of transformers without it, handed out by the server, kept by its hash."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.client import Engine, ModelTokenizer
from ragcache_core.client.prompts.chat_template import ChatTemplate
from ragcache_core.errors import ConfigError, PromptError, TokenizerUnavailableError
from ragcache_core.runtime.tokenizer_files import TokenizerFiles, sha256_of
from ragcache_core.types import Document
from tests.support.scripted_server import THREE_TIERS, ScriptedServer

ROOT = Path(__file__).parents[3]
DEMO_MODEL = ROOT / "examples" / "demo_model"
MESSAGES = [
    {"role": "system", "content": "Be <brief> & exact."},
    {"role": "user", "content": "Who founded Zorval?"},
    {"role": "assistant", "content": "Ünna."},
    {"role": "user", "content": "  When?\n"},
]
TEMPLATES = {
    "special tokens": "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m['content'] | trim }}{{ eos_token }}"
    "{% endfor %}{{ missing_token }}",
    "blocks on lines of their own": "{% for m in messages %}\n    {% if m.role == 'user' %}\n  {{ m.content }}\n"
    "    {% endif %}\n{% endfor %}\n",
    "loop controls": "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content }}"
    "{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}",
    "what the model wrote": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{% set x = 1 %}"
    "{{ loop.index }}{{ m.content }}{% endgeneration %}{{ x }}{% else %}{{ m.content }}{% endif %}{% endfor %}",
    "json": "{{ messages | tojson }}{{ messages | tojson(indent=2) }}{{ messages[0] | tojson(sort_keys=true) }}",
    "the date": "{{ strftime_now('%Y-%m-%d') }}",
    "what there is none of": "{{ tools is none }}{{ documents is none }}{{ x is defined }}{{ add_generation_prompt }}",
    "namespaces": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + m.content | length %}"
    "{% endfor %}{{ ns.n }}{{ messages[1:] | map(attribute='role') | join('+') }}",
}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where tokenizers are kept."""
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda name: str(tmp_path / name))
    return tmp_path / "ragcache" / "tokenizers"


@pytest.fixture
def server(cache: Path) -> Iterator[ScriptedServer]:
    """A server elsewhere: its model's path says nothing here, and it hands its tokenizer out."""
    with ScriptedServer(root="models/demo", api_key="secret", cache=THREE_TIERS) as running:
        running.tokenizer = TokenizerFiles.read(DEMO_MODEL).to_bytes()
        yield running


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names that the hub is asked for; it has none of them."""
    asked: list[str] = []

    def download(name: str, **_: Any) -> str:
        asked.append(name)
        raise OSError("there is no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    return asked


@pytest.fixture(scope="module")
def theirs() -> Any:
    """The demo model's tokenizer in transformers, as vLLM loads it."""
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(DEMO_MODEL)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_template_makes_the_text_that_it_makes_in_transformers(name: str, theirs: Any) -> None:
    ours = ModelTokenizer(DEMO_MODEL, chat_template=TEMPLATES[name]).render(MESSAGES)
    assert ours == theirs.apply_chat_template(
        MESSAGES, chat_template=TEMPLATES[name], tokenize=False, add_generation_prompt=True
    )


_FILES = TokenizerFiles.read(DEMO_MODEL)
_OURS = ModelTokenizer(_FILES)


@given(text=st.text(), is_whole=st.booleans())
def test_a_text_has_the_ids_and_offsets_that_it_has_in_transformers(theirs: Any, text: str, is_whole: bool) -> None:
    ours = _OURS.encode(text, add_special_tokens=is_whole)
    expected = theirs(text, add_special_tokens=is_whole, return_offsets_mapping=True)
    assert list(ours.token_ids) == expected["input_ids"]
    assert list(ours.offsets) == expected["offset_mapping"]


def test_templates_that_iterate_a_messages_parts_are_given_parts() -> None:
    source = (
        "{% for m in messages %}{% for part in m.content %}[{{ part.type }} {{ part.text }}]{% endfor %}{% endfor %}"
    )
    assert ChatTemplate(source, {}, wraps_text=True).render(MESSAGES[1:2]) == "[text Who founded Zorval?]"


def test_a_template_cannot_reach_into_python_and_a_broken_one_is_refused() -> None:
    with pytest.raises(PromptError, match="unsafe"):
        ChatTemplate("{{ messages.__class__.__mro__ }}", {}).render(MESSAGES)
    with pytest.raises(PromptError, match="cannot be read"):
        ChatTemplate("{% for %}", {})


def test_settings_of_older_models_are_read(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((DEMO_MODEL / "tokenizer.json").read_bytes())
    templates = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "{{ bos_token }}chat"}]
    settings = {"bos_token": {"content": "<s>", "lstrip": False}, "add_bos_token": True, "chat_template": templates}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert ModelTokenizer(tmp_path).render(MESSAGES) == "<s>chat"


def test_a_server_elsewhere_hands_its_tokenizer_out_and_the_hub_is_not_asked(
    server: ScriptedServer, no_hub: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with Engine.connect(server.url, api_key="secret") as engine:
        here = ModelTokenizer(DEMO_MODEL)
        assert engine.tokenize(MESSAGES) == list(here.encode(here.render(MESSAGES)).token_ids)
        assert engine.tokenize("Zorval") == list(here.encode("Zorval", add_special_tokens=True).token_ids)
        plan = engine.integration.prompts.plan_chat(
            [{"role": "user", "content": "Zorval is old. When?"}], documents=[Document("z", "Zorval is old.")]
        )
        assert "z" in [segment.doc_id for segment in plan.segments]
    assert (no_hub, caplog.records) == ([], [])


def test_the_template_that_the_server_was_given_and_its_settings_come_with_it(server: ScriptedServer) -> None:
    template = "{{ bos_token }}{% if enable_thinking %}think{% endif %} {{ messages[-1].content }}"
    files = TokenizerFiles(_FILES.tokenizer, _FILES.special_tokens, template, {"enable_thinking": True})
    server.tokenizer = files.to_bytes()
    with Engine.connect(server.url, api_key="secret") as engine:
        assert engine.tokenizer.render(MESSAGES) == "<s>think   When?\n"


def test_a_tokenizer_is_fetched_once_and_kept_for_its_owner_alone(server: ScriptedServer, cache: Path) -> None:
    for _ in range(2):
        Engine.connect(server.url, api_key="secret").close()
    assert server.tokenizer is not None
    sha256 = sha256_of(server.tokenizer)
    assert server.tokenizer_questions == ["tokenizer", f"tokenizer/{sha256}", "tokenizer"]
    (kept,) = cache.iterdir()
    assert kept.read_bytes() == server.tokenizer
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


def test_a_kept_tokenizer_that_was_changed_is_fetched_again(server: ScriptedServer, cache: Path) -> None:
    Engine.connect(server.url, api_key="secret").close()
    (kept,) = cache.iterdir()
    kept.write_bytes(kept.read_bytes().replace(b"<s>", b"<x>"))
    with Engine.connect(server.url, api_key="secret") as engine:
        assert engine.tokenizer.render(MESSAGES).startswith("<s>")
    assert kept.read_bytes() == server.tokenizer


def test_a_tokenizer_that_cannot_be_kept_is_used(server: ScriptedServer, cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("a file stands where the folder would")
    with Engine.connect(server.url, api_key="secret") as engine:
        assert engine.tokenize("Zorval")


@pytest.mark.parametrize("offered", ["0" * 64, "../../../etc/passwd"])
def test_what_is_not_what_was_offered_is_neither_used_nor_kept(
    server: ScriptedServer, cache: Path, offered: str, no_hub: list[str]
) -> None:
    server.offered_hash = offered
    with Engine.connect(server.url, api_key="secret") as engine, pytest.raises(TokenizerUnavailableError):
        _ = engine.tokenizer
    assert not cache.exists()


def test_a_plain_server_elsewhere_costs_one_warning_at_once(
    server: ScriptedServer, no_hub: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    server.tokenizer = None
    started_s = time.monotonic()
    with Engine.connect(server.url, api_key="secret") as engine:
        assert engine.integration.prompts.plan_chat(MESSAGES).extra_body == {}
    assert time.monotonic() - started_s < 5
    assert no_hub == []
    (warning,) = caplog.messages
    assert "'models/demo' is no folder of this machine: pass tokenizer= with a folder or a name of the hub" in warning
    assert "\n" not in warning


def test_a_relative_root_is_not_looked_up_though_such_a_folder_is_here(
    server: ScriptedServer, no_hub: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.tokenizer, server.root = None, "examples/demo_model"
    monkeypatch.chdir(ROOT)
    with Engine.connect(server.url, api_key="secret") as engine, pytest.raises(TokenizerUnavailableError):
        _ = engine.tokenizer
    server.root = str(DEMO_MODEL)
    with Engine.connect(server.url, api_key="secret") as engine:
        assert engine.tokenize("Zorval")


def test_the_hub_is_asked_for_what_a_user_names(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}

    def download(name: str, **settings: Any) -> str:
        asked.update(name=name, **settings)
        return str(DEMO_MODEL)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with Engine.connect(server.url, api_key="secret", tokenizer="someone/model") as engine:
        assert engine.tokenize("Zorval")
    assert asked["name"] == "someone/model"
    assert "model.safetensors" not in str(asked["allow_patterns"])
    assert server.tokenizer_questions == []


def test_who_asks_for_figures_only_needs_no_tokenizer(server: ScriptedServer, caplog: pytest.LogCaptureFixture) -> None:
    with Engine.connect(server.url, api_key="secret", tokenizer=False) as engine:
        assert engine.stats().policy == "mixture"
        with pytest.raises(TokenizerUnavailableError, match="tokenizer=False"):
            engine.tokenize("Zorval")
    assert server.tokenizer_questions == []
    assert caplog.records == []


def test_the_frameworks_doors_have_the_option_that_the_warning_names(
    server: ScriptedServer, caplog: pytest.LogCaptureFixture
) -> None:
    langchain = pytest.importorskip("ragcache_integrations.langchain")
    llamaindex = pytest.importorskip("ragcache_integrations.llamaindex")
    server.tokenizer = None
    model = langchain.ChatRAGCache(base_url=server.base_url, api_key="secret", tokenizer=str(DEMO_MODEL))
    assert model.connect().tokenize("Zorval")
    model.close()
    llm = llamaindex.RAGCacheLLM(api_base=server.base_url, api_key="secret", tokenizer=DEMO_MODEL)
    assert llm.engine.tokenize("Zorval")
    assert caplog.records == []
    for made in (langchain.ChatRAGCache, llamaindex.RAGCacheLLM):
        with pytest.raises(ConfigError, match=r"pass tokenizer= to Engine\.connect"):
            made(engine=llm.engine, tokenizer=str(DEMO_MODEL))
    llm.close()
    plain = langchain.ChatRAGCache(base_url=server.base_url, api_key="secret")
    plain.connect().close()
    assert "pass tokenizer=" in caplog.text


def test_llamaindexs_own_tokenizer_objects_still_count_for_its_max_tokens(server: ScriptedServer) -> None:
    llamaindex = pytest.importorskip("ragcache_integrations.llamaindex")

    class Words:
        def encode(self, text: str) -> list[int]:
            return [len(word) for word in text.split()]

    llm = llamaindex.RAGCacheLLM(api_base=server.base_url, api_key="secret", tokenizer=Words())
    assert llm.tokenizer.encode("a bc") == [1, 2]
    assert llm.engine.tokenize("Zorval")
    llm.close()


def test_a_client_imports_neither_transformers_nor_what_searches_stores() -> None:
    code = f"""
import sys
from ragcache_core.client import ModelTokenizer
import ragcache_integrations.langchain, ragcache_integrations.llamaindex
ModelTokenizer({str(DEMO_MODEL)!r}).render([{{"role": "user", "content": "Who?"}}])
print([name for name in ("transformers", "torch", "faiss", "scipy", "sklearn") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert "PyTorch" not in done.stderr


@pytest.mark.parametrize("missing", ["faiss", "scipy"])
def test_a_store_without_its_extra_says_what_to_install(missing: str, tmp_path: Path) -> None:
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
