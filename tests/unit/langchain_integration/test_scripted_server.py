"""The fake is held to what it promises, with a client that is not ours."""

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.support.scripted_server import ENGINE_DEAD, Refusal, Reply, ScriptedServer

HELLO: Any = [{"role": "user", "content": "hello to you"}]


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(api_key="a-key", max_model_len=64) as server:
        yield server


@pytest.fixture
def client(server: ScriptedServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.base_url, api_key="a-key", max_retries=0) as client:
        yield client


def chat(client: openai.OpenAI, **body: Any) -> Any:
    return client.chat.completions.create(**{"model": "scripted-model", "messages": HELLO, **body})


def test_it_has_the_routes_of_vllm(client: openai.OpenAI, server: ScriptedServer) -> None:
    (card,) = client.models.list().data
    assert card.model_dump()["max_model_len"] == 64
    assert httpx.get(f"{server.url}/health").status_code == 200
    server.is_healthy = False
    assert httpx.get(f"{server.url}/health").status_code == 503
    assert "vllm:num_requests_running" in httpx.get(f"{server.url}/metrics").text


@pytest.mark.parametrize("streamed", [False, True])
def test_text_comes_whole_or_in_words_and_ends_in_usage(client: openai.OpenAI, streamed: bool) -> None:
    if streamed:
        *events, last = chat(client, stream=True, stream_options={"include_usage": True})
        text = "".join(e.choices[0].delta.content or "" for e in events)
        assert len(events) > 4
    else:
        last = chat(client)
        text = last.choices[0].message.content
    assert text == "You said: hello to you"
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (4, 5)


def test_the_completions_endpoint_takes_token_ids(client: openai.OpenAI, server: ScriptedServer) -> None:
    server.script(Reply("one two three"))
    answer = client.completions.create(model=server.model, prompt=[5, 6, 7], max_tokens=2)
    assert answer.choices[0].text == "one two"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 3


def test_a_prefix_is_cached_in_whole_blocks(client: openai.OpenAI) -> None:
    def cached(ids: list[int]) -> int:
        usage = client.completions.create(model="scripted-model", prompt=ids, max_tokens=1).usage
        assert usage is not None
        details = usage.prompt_tokens_details
        return 0 if details is None else details.cached_tokens or 0

    ids = list(range(48))
    assert [cached(ids), cached(ids), cached([*ids[:20], 99]), cached([99, *ids])] == [0, 32, 16, 0]


@pytest.mark.parametrize(
    ("answer", "body", "expected"),
    [
        (Refusal(400, "no"), {}, openai.BadRequestError),
        (ENGINE_DEAD, {}, openai.InternalServerError),
        (Reply("one two three", cut_after_tokens=1), {}, openai.APIConnectionError),
        (Reply("one two three", cut_after_tokens=1), {"stream": True}, httpx.RemoteProtocolError),
        (Reply(), {"model": "another"}, openai.NotFoundError),
        (Reply(), {"max_tokens": 100}, openai.BadRequestError),
    ],
)
def test_failures_are_real(
    client: openai.OpenAI,
    server: ScriptedServer,
    answer: Reply | Refusal,
    body: dict[str, Any],
    expected: type[Exception],
) -> None:
    server.script(answer)
    with pytest.raises(expected):
        list(chat(client, **body))


def test_a_wrong_key_is_refused(server: ScriptedServer) -> None:
    with openai.OpenAI(base_url=server.base_url, api_key="wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError):
            client.models.list()


def test_rules_are_asked_in_order_after_the_script(client: openai.OpenAI, server: ScriptedServer) -> None:
    server.rules = [lambda _: None, lambda seen: Reply(seen.user_text.upper()), lambda _: Reply("never")]
    server.script(Reply("scripted"))
    assert [chat(client).choices[0].message.content for _ in range(2)] == ["scripted", "HELLO TO YOU"]


def test_a_client_that_hangs_up_ends_its_request(
    client: openai.OpenAI, server: ScriptedServer, eventually: Callable[[Callable[[], bool]], bool]
) -> None:
    server.script(Reply("word " * 10_000, token_wait_s=0.01))
    events = chat(client, stream=True)
    next(iter(events))
    assert server.num_running == 1
    events.close()
    assert eventually(lambda: server.num_running == 0)


def test_nothing_answers_after_it_was_closed() -> None:
    with ScriptedServer() as server, httpx.Client() as client:
        assert client.get(f"{server.url}/health").status_code == 200
        url = server.url
        server.__exit__()
        with pytest.raises(httpx.TransportError):
            client.get(f"{url}/health")
        server.__exit__()
