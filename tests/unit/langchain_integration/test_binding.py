"""The beginning of a chain's prompt, from LangChain's own templates and from the requests of ordinary chains."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from langchain_core.documents import Document as LangChainDocument
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder, PromptTemplate
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from langchain_openai.chat_models.base import _convert_message_to_dict

from ragcache_core.client import Engine
from ragcache_core.prompt import PromptLayout, RenderedPrompt, render_chat
from ragcache_integrations.langchain import (
    ChatRAGCache,
    RAGCacheRetriever,
    StagedFAISS,
    prompt_from_layout,
    to_langchain,
)
from tests.support.prefixes import DOCUMENTS, QUESTION, check_prefix

STATIC = "Answer the question from the documents, and say no more than they do. Be brief, and do not guess."
SHOWN = [to_langchain(d) for d in DOCUMENTS]
WORDS = st.sampled_from(["Zor", "sun", " ", "?", "\n", "é", "月", "12", ",", "{x}", "moons", "<b>"])
QUESTIONS = st.lists(WORDS, min_size=1, max_size=8).map("".join).filter(lambda text: bool(text.strip()))
HISTORY = [HumanMessage("Is anybody there?"), AIMessage("Yes.")]


def joined(documents: Sequence[LangChainDocument]) -> str:
    return "\n\n".join(d.page_content for d in documents)


def numbered(documents: Sequence[LangChainDocument]) -> str:
    return "\n".join(f"[{i}] {d.page_content}" for i, d in enumerate(documents, 1))


def by_id(documents: Sequence[LangChainDocument]) -> str:
    return joined(sorted(documents, key=lambda d: str(d.id)))


USER = "Context:\n{context}\n\nQuestion: {question}"
TEMPLATES: dict[str, tuple[Any, dict[str, Any]]] = {
    "system and human": (ChatPromptTemplate.from_messages([("system", STATIC), ("human", USER)]), {}),
    "human only": (ChatPromptTemplate.from_template(f"{STATIC}\n{USER}"), {}),
    "braces": (ChatPromptTemplate.from_messages([("system", "Write {{json}}, please."), ("human", USER)]), {}),
    "mustache": (
        ChatPromptTemplate.from_messages(
            [("system", STATIC), ("human", "{{{context}}}\n\nQuestion: {{{question}}}")], template_format="mustache"
        ),
        {},
    ),
    "jinja2": (
        ChatPromptTemplate.from_template(USER.replace("{", "{{ ").replace("}", " }}"), template_format="jinja2"),
        {},
    ),
    "documents in the system message": (
        ChatPromptTemplate.from_messages([("system", f"{STATIC}\n{{context}}"), ("human", "Question: {question}")]),
        {},
    ),
    "a history behind the documents": (
        ChatPromptTemplate.from_messages(
            [
                ("system", f"{STATIC}\n{{context}}"),
                MessagesPlaceholder("history"),
                ("human", "Question: {question}"),
            ]
        ),
        {"history": HISTORY},
    ),
    "an optional history": (
        ChatPromptTemplate.from_messages(
            [("system", f"{STATIC}\n{{context}}"), ("placeholder", "{history}"), ("human", "Question: {question}")]
        ),
        {},
    ),
    "another variable behind": (
        ChatPromptTemplate.from_messages([("system", STATIC), ("human", f"{USER} Answer in {{language}}.")]),
        {"language": "English"},
    ),
    "a partial variable": (
        ChatPromptTemplate.from_messages([("system", f"{STATIC} {{tone}}"), ("human", USER)]).partial(tone="Be kind."),
        {},
    ),
    "several messages": (
        ChatPromptTemplate.from_messages(
            [
                SystemMessage(STATIC),
                ("human", "Question: Who is there?"),
                ("ai", "No one."),
                ("human", "{context}"),
                ("human", "Question: {question}"),
            ]
        ),
        {},
    ),
    "a string template": (PromptTemplate.from_template(USER), {}),
    "ours": (prompt_from_layout(PromptLayout(STATIC)), {}),
}


def sent(engine: Engine, prompt: Any, variables: dict[str, Any]) -> RenderedPrompt:
    """The prompt as the chat model sends it."""
    messages = [_convert_message_to_dict(m) for m in prompt.invoke(variables).to_messages()]
    return render_chat(engine.tokenizer, messages, [(d.doc_id, d.text) for d in DOCUMENTS])


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("format_docs", [joined, numbered, by_id, RunnableLambda(numbered)])
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(question=QUESTIONS)
def test_the_prefix_of_a_template_is_the_beginning_of_what_the_chain_sends(
    engine: Engine, name: str, format_docs: Any, question: str
) -> None:
    prompt, others = TEMPLATES[name]
    bound = engine.bind_prompt(prompt, format_docs)
    assert not bound.is_question_first
    context = format_docs(SHOWN) if callable(format_docs) else format_docs.invoke(SHOWN)
    whole = sent(engine, prompt, {"context": context, "question": question, **others})
    shown = sorted(DOCUMENTS, key=lambda d: d.doc_id) if format_docs is by_id else DOCUMENTS
    check_prefix(bound.prefix(SHOWN, DOCUMENTS), whole, shown)


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([("system", STATIC), ("human", "Question: {question}\n\n{context}")], "'question'"),
        ([("system", STATIC), MessagesPlaceholder("history"), ("human", USER)], "'history'"),
        ([("system", STATIC), ("placeholder", "{history}"), ("human", "{question} {context}")], "'history' and 'quest"),
    ],
)
def test_what_stands_before_the_documents_is_named_once(
    engine: Engine, caplog: pytest.LogCaptureFixture, messages: list[Any], said: str
) -> None:
    prompt = ChatPromptTemplate.from_messages(messages)
    bound = engine.bind_prompt(prompt, joined)
    assert bound.is_question_first
    prefixes = {bound.prefix(SHOWN[:n], DOCUMENTS[:n]) for n in (1, 2, 3)}
    (record,) = [r for r in caplog.records if r.name.startswith("ragcache")]
    assert said in record.getMessage()
    (prefix,) = prefixes
    assert prefix is not None
    whole = sent(engine, prompt, {"context": joined(SHOWN), "question": QUESTION, "history": HISTORY})
    assert prefix.token_ids == whole.token_ids[: len(prefix.token_ids)]


@pytest.mark.parametrize(
    "name", ["system and human", "human only", "documents in the system message", "a string template", "ours"]
)
@pytest.mark.parametrize("format_docs", [joined, numbered])
def test_a_chain_teaches_its_prompt_with_its_first_request(
    engine: Engine, llm: ChatRAGCache, tmp_path: Path, name: str, format_docs: Any
) -> None:
    store = StagedFAISS.from_texts([d.text for d in DOCUMENTS], ids=[d.doc_id for d in DOCUMENTS], path=tmp_path / "s")
    retriever = RAGCacheRetriever(store=store, engine=engine, k=2)
    prompt, _ = TEMPLATES[name]
    chain = {"context": retriever | format_docs, "question": RunnablePassthrough()} | prompt | llm
    chain.invoke(QUESTION)
    learned = engine.integration.prompts.bound_prompt
    assert learned is not None
    assert not learned.is_question_first
    whole = sent(engine, prompt, {"context": format_docs(SHOWN), "question": "Which one is red?"})
    check_prefix(learned.prefix(SHOWN, DOCUMENTS), whole, DOCUMENTS)
