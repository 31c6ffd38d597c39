"""The demo model's chat template over the message shapes that chat clients send."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from examples.demo_model_training import export
from examples.demo_model_training.tokenizer import SYSTEM_PROMPT, huggingface_tokenizer

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


def test_system_and_user_content_stay_contiguous_and_in_order() -> None:
    system, user = "Be short.", "Document: a b. Document: c. Question: Who?"
    rendered = render({"role": "system", "content": system}, {"role": "user", "content": user})
    assert rendered == f"<s>{system} {user} Answer:"


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
