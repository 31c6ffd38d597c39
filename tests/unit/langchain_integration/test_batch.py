"""Batches of the chat model: requests in the order of their prefixes, the rest as in any batch of LangChain's."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableConfig

from ragcache_core.errors import RequestRejectedError
from ragcache_integrations.langchain import ChatRAGCache
from tests.support.scripted_server import Refusal, ScriptedServer


def _mixed_prompts() -> list[str]:
    return [
        f"{document} is a river.\n\nQuestion: {number}?" for number in range(3) for document in ("Mel", "Aro", "Tar")
    ]


async def test_a_batch_is_asked_in_the_order_of_prefixes_and_answered_in_that_of_its_inputs(
    llm: ChatRAGCache, server: ScriptedServer
) -> None:
    inputs = _mixed_prompts()
    config: RunnableConfig = {"max_concurrency": 1}
    asked = (llm, llm.bind(max_tokens=99), llm.with_config(tags=["offline"]))
    for answers in [model.batch(inputs, config) for model in asked] + [await m.abatch(inputs, config) for m in asked]:
        assert [answer.content for answer in answers] == [f"You said: {text}" for text in inputs]
    assert [request.user_text for request in server.requests] == sorted(inputs) * 6
    assert llm.batch([]) == []


def test_exceptions_and_configurations_of_a_batch_belong_to_their_inputs(
    llm: ChatRAGCache, server: ScriptedServer
) -> None:
    inputs: list[Any] = [*_mixed_prompts(), 7]
    server.rules = (lambda seen: Refusal(400, "not this one") if seen.user_text == inputs[4] else None,)
    names: dict[str, str] = {}

    class Recorder(BaseCallbackHandler):
        def on_chat_model_start(self, serialized: Any, messages: Any, *, tags: Any = None, **kwargs: Any) -> None:
            names[messages[0][0].content] = tags[0]

    configs: list[RunnableConfig] = [{"tags": [f"tag {i}"], "callbacks": [Recorder()]} for i in range(len(inputs))]
    configs[0]["max_concurrency"] = 1
    answers = llm.batch(inputs, configs, return_exceptions=True)
    assert [i for i, answer in enumerate(answers) if isinstance(answer, Exception)] == [4, 9]
    assert names == {text: f"tag {i}" for i, text in enumerate(inputs[:-1])}
    with pytest.raises(RequestRejectedError):
        llm.batch(inputs[:-1])


def test_a_chain_retrieves_all_first_and_asks_in_the_order_of_prefixes(
    llm: ChatRAGCache, server: ScriptedServer
) -> None:
    shown = {"Mel is a river": "abc", "Aro is a town": "xyz"}
    prompt = ChatPromptTemplate.from_template("{context}.\n\nQuestion: {question}")
    searched = []

    def search(question: str) -> str:
        searched.append(len(server.requests))
        return next(context for context, questions in shown.items() if question in questions)

    chain = {"context": search, "question": lambda question: question} | prompt | llm
    answers = chain.batch(list("axbycz"), {"max_concurrency": 1})
    assert searched == [0] * 6
    assert [answer.content[-1] for answer in answers] == list("axbycz")
    assert [request.user_text[-1] for request in server.requests] == list("xyzabc")
