"""The demo model's chat template over the message shapes that chat clients send."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from examples.demo_model_training import export
from examples.demo_model_training.tokenizer import BOS_ID, SYSTEM_PROMPT, huggingface_tokenizer

TEMPLATE = Path(export.__file__).with_name("chat_template.jinja").read_text(encoding="utf-8")
CALL = [{"id": "call-1", "type": "function", "function": {"name": "search", "arguments": '{"query": "x"}'}}]


def search_tool(argument: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    return {"type": "function", "function": {"name": "search", "description": "Search.", "parameters": parameters}}


@cache
def tokenizer() -> Any:
    return huggingface_tokenizer(TEMPLATE, export.MAX_NUM_TOKENS)


def render(*messages: dict[str, Any], **options: Any) -> str:
    text = tokenizer().apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True, **options)
    return " ".join(text.split())


def test_user_text_becomes_a_question_under_the_default_system_prompt() -> None:
    assert render({"role": "user", "content": "Hello"}) == f"<s>{SYSTEM_PROMPT} Question: Hello Answer:"


def test_system_and_user_content_stay_contiguous_and_in_order() -> None:
    system, user = "Be short.", "Document: a b. Document: c. Question: Who?"
    rendered = render({"role": "system", "content": system}, {"role": "user", "content": user})
    assert rendered == f"<s>{system} {user} Answer:"


def test_documents_in_the_system_message_come_before_the_question() -> None:
    rendered = render({"role": "system", "content": "Do. Document: a."}, {"role": "user", "content": "Who?"})
    assert rendered == "<s>Do. Document: a. Question: Who? Answer:"


def test_list_content_reads_as_its_text_parts() -> None:
    parts = [{"type": "text", "text": "Who founded"}, {"type": "text", "text": "Zorval?"}]
    rendered = render({"role": "developer", "content": parts[:1]}, {"role": "user", "name": "ada", "content": parts})
    assert rendered == "<s>Who founded Question: Who founded Zorval? Answer:"


def test_earlier_turns_end_with_the_eos_token() -> None:
    rendered = render(
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": "Anna"},
        {"role": "user", "content": "When?"},
    )
    assert rendered == f"<s>{SYSTEM_PROMPT} Question: Who? Answer: Anna</s> Question: When? Answer:"


@pytest.mark.parametrize("argument", ["query", "input"])
def test_tool_line_names_the_argument_of_the_tool(argument: str) -> None:
    rendered = render({"role": "user", "content": "Who?"}, tools=[search_tool(argument)])
    assert rendered == f"<s>{SYSTEM_PROMPT} Tool: search {argument} Question: Who? Answer:"


def test_tool_with_another_argument_is_called_with_query() -> None:
    rendered = render({"role": "user", "content": "Who?"}, tools=[search_tool("question")])
    assert "Tool: search query" in rendered


@pytest.mark.parametrize("content", [None, "", []])
def test_tool_result_stands_before_the_question_as_a_document(content: Any) -> None:
    rendered = render(
        {"role": "user", "content": "Who founded Zorval?"},
        {"role": "assistant", "content": content, "tool_calls": CALL},
        {"role": "tool", "tool_call_id": "call-1", "content": "Anna Brenk"},
        tools=[search_tool("input")],
    )
    expected = f"<s>{SYSTEM_PROMPT} Tool: search input Document: Anna Brenk Question: Who founded Zorval? Answer:"
    assert rendered == expected


def test_tool_result_that_holds_documents_is_not_prefixed_again() -> None:
    result = "Document: a. Document: b."
    rendered = render({"role": "user", "content": "Who?"}, {"role": "tool", "content": result})
    assert rendered == f"<s>{SYSTEM_PROMPT} {result} Question: Who? Answer:"


def test_results_of_answered_questions_are_left_out() -> None:
    rendered = render(
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": None, "tool_calls": CALL},
        {"role": "tool", "content": "Anna"},
        {"role": "assistant", "content": "Anna"},
        {"role": "user", "content": "When?"},
        tools=[search_tool("query")],
    )
    assert rendered.endswith("Tool: search query Question: Who? Answer: Anna</s> Question: When? Answer:")


def test_answer_is_not_asked_for_twice() -> None:
    assert render({"role": "user", "content": "Question: Who? Answer:"}).count("Answer:") == 1


def test_rendered_prompt_has_exactly_one_bos_token() -> None:
    encoded = tokenizer().apply_chat_template([{"role": "user", "content": "Hello"}], add_generation_prompt=True)
    assert list(encoded["input_ids"]).count(BOS_ID) == 1
