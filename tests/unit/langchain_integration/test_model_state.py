"""LangChain makes configured copies of objects from their own fields."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from langchain_core.runnables import ConfigurableField, Runnable
from pydantic import BaseModel

from ragcache_core import Document, DocumentStore
from ragcache_core.client import Engine
from ragcache_core.errors import ConfigError
from ragcache_integrations.langchain import ChatRAGCache, RAGCacheRetriever, SpeculativeRAG, prompt_from_layout
from tests.support.scripted_server import ScriptedServer

DOCUMENTS = [Document("sun", "The sun is a star."), Document("moon", "The moon is a rock.")]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DocumentStore]:
    with DocumentStore.create(tmp_path / "docs.ragcache") as store:
        store.add(DOCUMENTS)
        yield store


@pytest.fixture
def objects(store: DocumentStore, engine: Engine, server: ScriptedServer) -> dict[str, Runnable[Any, Any]]:
    llm = ChatRAGCache(engine=engine, temperature=0)
    retriever = RAGCacheRetriever(store=store, engine=engine, k=1)
    return {
        "model": llm,
        "joined model": ChatRAGCache(base_url=server.base_url, api_key=server.api_key, temperature=0),
        "retriever": retriever,
        "rag": SpeculativeRAG(retriever=retriever, prompt=prompt_from_layout(), llm=llm),
    }


OBJECTS = ["model", "joined model", "retriever", "rag"]


@pytest.mark.parametrize("name", OBJECTS)
async def test_every_copy_answers_as_the_object(objects: dict[str, Runnable[Any, Any]], name: str) -> None:
    original = objects[name]
    model = cast("BaseModel", original)
    state = {field: value for field, value in model.__dict__.items() if field in type(model).model_fields}

    def said(answer: Any) -> Any:
        return getattr(answer, "content", answer)

    expected = said(original.invoke("What is the sun?"))
    copies: list[Any] = [type(model)(**state), model.model_copy(), copy.copy(model), original.with_config(tags=["x"])]
    for each in copies:
        assert said(each.invoke("What is the sun?")) == expected
        assert said(await each.ainvoke("What is the sun?")) == expected


@pytest.mark.parametrize("name", ["model", "joined model"])
def test_a_field_of_a_model_is_configured_per_call(
    objects: dict[str, Runnable[Any, Any]], name: str, server: ScriptedServer
) -> None:
    llm = cast("ChatRAGCache", objects[name])
    configurable: Any = llm.configurable_fields(temperature=ConfigurableField(id="t"))
    for temperature in (0.25, 0.5):
        configurable.with_config(configurable={"t": temperature}).invoke("Who?")
        assert server.requests[-1].body["temperature"] == temperature
    assert configurable.invoke("Who?").content
    assert server.requests[-1].body["temperature"] == 0


def test_a_configured_address_or_engine_gets_the_request(engine: Engine, server: ScriptedServer) -> None:
    with ScriptedServer(root=server.root) as other, Engine.connect(other.url) as its_engine:
        joined = ChatRAGCache(base_url=server.base_url, api_key=server.api_key)
        by_address: Any = joined.configurable_fields(openai_api_base=ConfigurableField(id="a"))
        by_address.with_config(configurable={"a": other.base_url}).invoke("Who?")
        by_engine: Any = ChatRAGCache(engine=engine).configurable_fields(engine=ConfigurableField(id="e"))
        by_engine.with_config(configurable={"e": its_engine}).invoke("Who?")
        assert len(other.requests) == 2
        joined.close()
    with pytest.raises(ConfigError, match="both given"):
        ChatRAGCache(engine=engine, base_url="http://elsewhere:8000/v1")


async def test_a_rag_speculates_with_configurable_parts(
    objects: dict[str, Runnable[Any, Any]], server: ScriptedServer, caplog: pytest.LogCaptureFixture
) -> None:
    llm = cast("ChatRAGCache", objects["joined model"]).configurable_fields(temperature=ConfigurableField(id="t"))
    retriever = cast("RAGCacheRetriever", objects["retriever"]).configurable_fields(k=ConfigurableField(id="k"))
    rag: Any = SpeculativeRAG(retriever=cast("Any", retriever), prompt=prompt_from_layout(), llm=cast("Any", llm))
    configured = rag.with_config(configurable={"t": 0.5, "k": 2})
    for answer in (configured.invoke("What is the sun?"), await configured.ainvoke("What is the sun?")):
        assert all(document.text in answer.content for document in DOCUMENTS)
        assert server.requests[-1].body["temperature"] == 0.5
    assert "no ChatRAGCache" not in caplog.text
