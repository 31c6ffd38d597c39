"""The beginning of a prompt from LlamaIndex's own templates, and learned from its requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llama_index.core import ChatPromptTemplate, PromptTemplate
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import BasePromptTemplate, RichPromptTemplate
from llama_index.core.prompts.default_prompt_selectors import DEFAULT_TEXT_QA_PROMPT_SEL
from llama_index.core.prompts.default_prompts import DEFAULT_TEXT_QA_PROMPT
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.llms.openai.utils import to_openai_message_dicts

from ragcache_core.client import Engine
from ragcache_core.prompt import PromptLayout, RenderedPrompt, render_chat
from ragcache_integrations.llamaindex import RAGCacheLLM, RAGCacheQueryEngine, node_from_document
from tests.contracts.rag.frameworks import ListRetriever
from tests.support.prefixes import DOCUMENTS, QUESTION, check_prefix

STATIC = "Answer the question from the documents, and say no more than they do. Be brief, and do not guess."
NODES = [NodeWithScore(node=node_from_document(d), score=1.0) for d in DOCUMENTS]
WORDS = st.sampled_from(["Zor", "sun", " ", "?", "\n", "é", "月", "12", ",", "{x}", "moons"])
QUESTIONS = st.lists(WORDS, min_size=1, max_size=8).map("".join).filter(lambda text: bool(text.strip()))
USER = "Context:\n{context_str}\n\nQuestion: {query_str}"
NAMES = {"context": "context_str", "question": "query_str"}
MAPPED = PromptTemplate(
    f"{STATIC} {{docs}} Question: {{ask}}", template_var_mappings={"context_str": "docs", "query_str": "ask"}
)

TEMPLATES: dict[str, BasePromptTemplate] = {
    "string": PromptTemplate(USER),
    "chat": ChatPromptTemplate([ChatMessage(role="system", content=STATIC), ChatMessage(role="user", content=USER)]),
    "documents in the system message": ChatPromptTemplate.from_messages(
        [("system", f"{STATIC}\n{{context_str}}"), ("user", "Question: {query_str}")]
    ),
    "several messages": ChatPromptTemplate.from_messages(
        [("system", STATIC), ("user", "Question: Who is there?"), ("assistant", "No one."), ("user", USER)]
    ),
    "partial": PromptTemplate(f"{{tone}} {USER}").partial_format(tone="Be kind."),
    "mapped": MAPPED,
    "rich": RichPromptTemplate(
        "{% chat role='user' %}Context: {{ context_str }}\nQuestion: {{ query_str }}{% endchat %}"
    ),
    "LlamaIndex's own": DEFAULT_TEXT_QA_PROMPT,
    "LlamaIndex's own choice": DEFAULT_TEXT_QA_PROMPT_SEL,
}


def format_nodes(nodes: Sequence[NodeWithScore]) -> str:
    return "\n\n".join(node.node.get_content() for node in nodes)


def sent(engine: Engine, template: BasePromptTemplate, question: str) -> RenderedPrompt:
    """The prompt as the LLM sends it."""
    messages: Any = template.format_messages(context_str=format_nodes(NODES), query_str=question)
    plain: Any = to_openai_message_dicts(messages)
    return render_chat(engine.tokenizer, plain, [(d.doc_id, d.text) for d in DOCUMENTS])


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(question=QUESTIONS)
def test_the_prefix_of_a_template_is_the_beginning_of_what_is_sent(engine: Engine, name: str, question: str) -> None:
    bound = engine.bind_prompt(TEMPLATES[name], format_nodes, **NAMES)
    assert not bound.is_question_first
    check_prefix(bound.prefix(NODES, DOCUMENTS), sent(engine, TEMPLATES[name], question), DOCUMENTS)


@pytest.mark.parametrize("layout", [PromptLayout(STATIC), PromptLayout(STATIC, document_format="[{doc_id}] {text}.")])
def test_a_query_engine_teaches_its_layout_and_a_bound_one_agrees(
    engine: Engine, llm: RAGCacheLLM, layout: PromptLayout
) -> None:
    engine.remember_documents(DOCUMENTS[:2], query=QUESTION)
    query_engine = RAGCacheQueryEngine(
        ListRetriever(*(TextNode(id_=d.doc_id, text=d.text) for d in DOCUMENTS[:2])), llm, layout=layout
    )
    query_engine.query(QUESTION)
    learned = engine.integration.prompts.bound_prompt
    assert learned is not None
    whole = layout.render(engine.tokenizer, DOCUMENTS, "Which one is red?")
    for prompt in (learned, engine.bind_prompt(layout)):
        prefix = prompt.prefix(NODES, DOCUMENTS)
        assert prefix is not None
        assert prefix.token_ids == whole.token_ids[: len(prefix.token_ids)]
        assert [s.doc_id for s in prefix.segments if s.doc_id] == [d.doc_id for d in DOCUMENTS]
