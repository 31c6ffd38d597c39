"""What is prefilled during a search carries what separates the KV of the request that follows: salt, adapter, key."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from ragcache_core import Document
from ragcache_core.errors import ConfigError
from ragcache_core.prompt import PromptLayout
from tests.contracts.rag.frameworks import Framework
from tests.support import scripted_source
from tests.support.scripted_server import ScriptedServer, Seen
from tests.support.scripted_source import DOCUMENTS, QUESTION, ScriptedSource, Stage

pytestmark = pytest.mark.usefixtures("idle")
NOT_BELOW_THE_GPU = {"kv_transfer_params": {"max_offload_tokens": 0}}
SETTINGS: dict[str, dict[str, Any]] = {
    "salt": {"extra_body": {"cache_salt": "tenant-a"}},
    "adapter": {"model": "an-adapter"},
    "adapter by extra_body": {"extra_body": {"model": "an-adapter"}},
    "not below the GPU": {"extra_body": NOT_BELOW_THE_GPU},
    "key": {"default_headers": {"Authorization": "Bearer of-tenant-a"}},
    "all": {"model": "an-adapter", "extra_body": {"cache_salt": "tenant-a", **NOT_BELOW_THE_GPU}},
    "none": {},
}


@pytest.fixture(autouse=True)
def adapters(server: ScriptedServer) -> None:
    server.adapters = ("an-adapter",)


def separates(seen: Seen) -> dict[str, Any]:
    """Return what keeps a request's KV apart."""
    params = {k: v for k, v in seen.kv_transfer_params.items() if k not in ("ragcache", "prompt_token_ids")}
    said = {name: seen.body.get(name) for name in ("model", "cache_salt")}
    return {**said, "params": params, "key": seen.authorization}


def ask(framework: Framework, model: Any, warmed: Any, *, may_prefill: bool = True, **settings: Any) -> None:
    """Ask a chain whose search ends when something is prefilled, or at once where nothing may be."""
    num_before = len(warmed())
    last = Stage("moon sun", once=lambda: not may_prefill or len(warmed()) > num_before)
    retriever = framework.retriever(ScriptedSource((Stage("moon sun"), last)), **settings)
    framework.laid_out(retriever, model)(QUESTION)
    assert may_prefill or len(warmed()) == num_before


@pytest.mark.parametrize("name", SETTINGS)
def test_a_learned_prompt_is_prefilled_for_requests_like_those_before(
    framework: Framework, name: str, warmed: Any, generations: Any
) -> None:
    model = framework.model(**SETTINGS[name])
    ask(framework, model, warmed, may_prefill=False)
    ask(framework, model, warmed)
    assert separates(warmed()[0]) == separates(generations()[-1])


@pytest.mark.parametrize("name", SETTINGS)
def test_a_bound_prompt_is_prefilled_for_the_requests_of_the_only_model(
    framework: Framework, name: str, warmed: Any, generations: Any
) -> None:
    framework.bind(PromptLayout())
    ask(framework, framework.model(**SETTINGS[name]), warmed)
    assert separates(warmed()[0]) == separates(generations()[-1])


def test_of_several_models_the_one_that_shows_documents_counts(
    framework: Framework, warmed: Any, generations: Any
) -> None:
    framework.bind(PromptLayout())
    asyncio.run(framework.ask(next(iter(framework.asks)), framework.model(), "Is anybody there?"))
    answering = framework.model(model="an-adapter")
    ask(framework, answering, warmed, may_prefill=False)
    ask(framework, answering, warmed)
    assert separates(warmed()[-1]) == separates(generations()[-1])


def test_where_requests_differ_nothing_is_prefilled_for_an_unknown_one(
    framework: Framework, warmed: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def said() -> list[str]:
        return [message for message in caplog.messages if message.startswith("RC-SCOPE-UNKNOWN: ")]

    framework.bind(PromptLayout())
    models = [framework.model(extra_body={"cache_salt": salt}) for salt in "ab"]
    with caplog.at_level(logging.WARNING, "ragcache"):
        for model in models:
            ask(framework, model, warmed, may_prefill=False)
        for model in models * 2:
            last = Stage("moon sun", once=lambda: bool(said()))
            framework.laid_out(framework.retriever(ScriptedSource((Stage("moon sun"), last))), model)(QUESTION)
    assert warmed() == []
    (message,) = said()
    assert "settings=" in message
    with pytest.raises(ConfigError, match="settings="):
        framework.engine.warm([DOCUMENTS["moon"]])


def test_a_prompt_that_was_bound_with_settings_is_prefilled_and_warmed_for_them(
    framework: Framework, warmed: Any, generations: Any, server: ScriptedServer
) -> None:
    for salt in "abab":
        settings = {"extra_body": {"cache_salt": salt}}
        bound = framework.bind(PromptLayout(), is_default=False, settings=settings)
        ask(framework, framework.model(**settings), warmed, prompt=bound)
        assert separates(warmed()[-1]) == separates(generations()[-1])
        assert warmed()[-1].body["cache_salt"] == salt
    framework.bind(PromptLayout(), settings=SETTINGS["all"])
    assert framework.engine.warm([DOCUMENTS["moon"]]) == 1
    warm = server.requests[-1].body
    assert (warm["cache_salt"], warm["model"]) == ("tenant-a", "an-adapter")


def test_the_salt_of_the_documents_groups_is_joined_as_in_the_request(
    framework: Framework, warmed: Any, generations: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    restricted = {
        name: Document(f"restricted-{name}", f"{d.text} Keep it to yourself.", acl=["hr"])
        for name, d in DOCUMENTS.items()
    }
    monkeypatch.setattr(scripted_source, "DOCUMENTS", restricted)
    framework.bind(PromptLayout())
    ask(framework, framework.model(**SETTINGS["salt"]), warmed)
    assert separates(warmed()[0]) == separates(generations()[-1])
    assert warmed()[0].body["cache_salt"].startswith("acl-")
