"""What is one prompt, and one answer."""

import copy
import pickle
from typing import Any

import pytest

from ragcache_core.client import Engine
from ragcache_core.errors import ConfigError
from tests.support.scripted_server import Reply, ScriptedServer

SEVERAL: list[dict[str, Any]] = [{"n": 2}, {"extra_body": {"n": 2}}]
PROMPTS: list[Any] = ["Who?", [{"role": "user", "content": "Who?"}]]


@pytest.mark.parametrize("settings", SEVERAL)
async def test_several_answers_are_refused_where_one_text_is_returned(engine: Engine, settings: Any) -> None:
    with pytest.raises(ConfigError, match="n is 2, but one text is returned"):
        engine.generate("Who?", **settings)
    with pytest.raises(ConfigError, match="n is 2, but one text is returned"):
        await engine.agenerate("Who?", **settings)


@pytest.mark.parametrize("settings", SEVERAL)
@pytest.mark.parametrize("prompt", PROMPTS)
async def test_a_stream_of_several_answers_holds_the_first(
    engine: Engine, server: ScriptedServer, prompt: Any, settings: Any
) -> None:
    server.rules = [lambda _: Reply("one two three")]
    assert "".join(chunk.text for chunk in engine.stream(prompt, **settings)) == "one two three"
    assert "".join([chunk.text async for chunk in engine.astream(prompt, **settings)]) == "one two three"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (["a", "b"], "a list of 2 texts: send one request for each"),
        ([], r"the prompt is \[\]: pass a text"),
        (None, "the prompt is None: pass a text"),
        (b"Who?", "the prompt is b'Who[?]': pass a text"),
        ([["Who?"]], "or messages like"),
    ],
)
async def test_what_is_no_prompt_is_refused(engine: Engine, prompt: Any, message: str) -> None:
    for ask in (engine.generate, engine.tokenize, engine.prefetch, lambda each: list(engine.stream(each))):
        with pytest.raises(ConfigError, match=message):
            ask(prompt)
    with pytest.raises(ConfigError, match=message):
        await engine.agenerate(prompt)


def test_an_engine_is_neither_copied_nor_pickled(engine: Engine) -> None:
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="Engine holds open connections"):
            duplicate(engine)
