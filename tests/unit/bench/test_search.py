"""The search in front of a request: vectors and index by seed, what is asked then, and what is sent ahead."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Never

import numpy as np
import pytest

from ragcache_core.bench.compare.load_generator import Load
from ragcache_core.bench.compare.search import index
from ragcache_core.bench.compare.search.index import SearchIndex, SearchOptions, open_index
from ragcache_core.bench.compare.search.prompts import SearchedPrompts
from ragcache_core.bench.compare.search.question import Searched, SearchRun
from ragcache_core.bench.compare.search.vectors import TOPIC_SIZE, DocumentVectors
from ragcache_core.client import Engine
from ragcache_core.errors import ConfigError
from ragcache_core.memory import Memory
from ragcache_core.ordering import DocumentOrder
from ragcache_core.retrieval import DocumentStore
from ragcache_core.sim.traces.workload import WORKLOADS
from ragcache_core.types import RetrievalUpdate
from ragcache_core.wire import decode_kv_transfer_params
from tests.support.scripted_server import IDLE, THREE_TIERS, ScriptedServer, Seen

COUNT, DIM = 3_000, 16
WORKLOAD = WORKLOADS["mmlu"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("searches")


@pytest.fixture
def store(folder: Path) -> Iterator[SearchIndex]:
    with open_index(SearchOptions(COUNT, DIM), folder) as opened:
        yield opened


@pytest.fixture
def prompts(store: SearchIndex) -> SearchedPrompts:
    return SearchedPrompts(store, WORKLOAD, 12, 1_024, seed=0, scale=0.02, num_output_tokens=2)


def test_a_document_has_the_same_vector_whichever_are_drawn_with_it() -> None:
    large = DocumentVectors(20_000, DIM)
    np.testing.assert_array_equal(large.draw(8_000, 17_000), large.draw(0, 20_000)[8_000:17_000])


def test_a_question_finds_its_topic_and_its_document_first_as_often_as_the_workload_says() -> None:
    about = np.random.default_rng(1).integers(COUNT, size=1_000)
    vectors = DocumentVectors(COUNT, 64)
    questions, documents = vectors.questions(about, 0, 0.75), vectors.draw(0, COUNT)
    distances = (documents**2).sum(axis=1) - 2 * questions @ documents.T
    nearest = distances.argsort(axis=1)[:, :2]
    assert 0.7 < np.mean(nearest[:, 0] == about) < 0.8
    assert np.mean(nearest // TOPIC_SIZE == about[:, None] // TOPIC_SIZE) > 0.98
    assert not np.array_equal(questions, vectors.questions(about, 1, 0.75))


@pytest.mark.parametrize("kind", ["ivf", "flat"])
def test_an_index_is_made_once(kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = SearchOptions(1_000, DIM, kind)
    with open_index(options, tmp_path) as made:
        first = made.search_vector(np.zeros(DIM), 5)
        assert (len(made), made.index_kind) == (1_000, kind)
    monkeypatch.setattr(DocumentStore, "create", lambda *_, **__: pytest.fail("it was made again"))
    with open_index(options, tmp_path) as opened:
        assert opened.search_vector(np.zeros(DIM), 5) == first
    assert len(list(tmp_path.iterdir())) == 1


def test_one_index_serves_every_share_of_its_lists(folder: Path) -> None:
    question = DocumentVectors(COUNT, DIM).questions(np.arange(200), 0, 0.1)
    found = {}
    for share in (0.02, 1.0):
        with open_index(SearchOptions(COUNT, DIM, share=share), folder) as opened:
            assert opened.stats().index_layout == "ivf"
            found[share] = [opened.search_vector(vector, 5).scores for vector in question]
    assert len(list(folder.iterdir())) == 1
    assert all(few[0] >= all_[0] for few, all_ in zip(found[0.02], found[1.0], strict=True))
    assert found[0.02] != found[1.0]


def test_of_an_index_whose_making_was_interrupted_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> Never:
        raise KeyboardInterrupt

    monkeypatch.setattr(DocumentStore, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        open_index(SearchOptions(1_000, DIM), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_index_that_memory_does_not_hold_is_refused_before_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "read_memory", lambda: Memory(total=8 << 30, available=2 << 30))
    with pytest.raises(ConfigError, match=r"an index of 50,000,000 vectors of 128 .* takes about .* GiB .* 2\.0 GiB"):
        open_index(SearchOptions(50_000_000), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"count": 0}, "among 0 vectors"),
        ({"count": 9, "kind": "flat", "share": 0.5}, "not for flat"),
        ({"count": 9, "share": 1.5}, "--search-share is 1.5"),
    ],
)
def test_a_search_that_cannot_work_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SearchOptions(**options)


def test_prompts_are_about_what_the_search_finds(store: SearchIndex, prompts: SearchedPrompts) -> None:
    for number in range(len(prompts)):
        found = [document.doc_id for document in store.search_vector(prompts.question(number), 2).documents]
        assert [document.doc_id for document in prompts.documents(number)] == found
        request = prompts.request(number)
        assert len(request.token_ids) + 2 == prompts.num_tokens(number)
        assert prompts.request_about(number, found, is_reordered=False, sends_documents=True) == request


def test_another_document_can_be_shown_than_those_that_the_search_ends_with(prompts: SearchedPrompts) -> None:
    request = prompts.request_about(0, ["d2999", "d0"], is_reordered=True, sends_documents=True)
    assert request.params is not None
    metadata = decode_kv_transfer_params(request.params, len(request.token_ids))
    assert [s.doc_id for s in metadata.segments if s.doc_id] == ["d2999", "d0"]
    assert metadata.is_reordered


def ask(
    prompts: SearchedPrompts, model: str, num_requests: int = 4, *, is_ours: bool, speculates: bool = False,
    order: DocumentOrder = "retrieval",
) -> tuple[list[Searched], ScriptedServer]:  # fmt: skip
    """Ask for the first requests one after the other; return their searches, and the server with what it saw."""
    cache = THREE_TIERS if is_ours else None
    with (
        ScriptedServer(cache=cache, load=IDLE if is_ours else None) as server,
        Engine.connect(server.url, tokenizer=model) as engine,
    ):
        load = Load(engine, prompts, order=order, sends_documents=is_ours, speculates=speculates)
        answers = load.run_through(range(num_requests), in_flight=1)
        assert engine.stats().num_prompt_tokens > 0
    searches = [answer.search for answer in answers if answer.search is not None]
    assert len(searches) == num_requests
    assert all(answer.ttft_s > search.search_s > 0 for answer, search in zip(answers, searches, strict=True))
    return searches, server


def asked(server: ScriptedServer) -> list[Seen]:
    return [seen for seen in server.requests if "prompt" in seen.body]


def test_an_engine_of_vllm_is_asked_when_the_whole_search_has_ended(prompts: SearchedPrompts, demo_model: str) -> None:
    searches, server = ask(prompts, demo_model, is_ours=False)
    assert [seen.body["prompt"] for seen in asked(server)] == [list(prompts.request(i).token_ids) for i in range(4)]
    assert not any("kv_transfer_params" in seen.body for seen in asked(server))
    assert {(s.num_stages, s.num_speculations, s.is_right) for s in searches} == {(1, 0, False)}
    assert all(search.unhidden_s == search.search_s for search in searches)


def staged(store: SearchIndex, first: Callable[[RetrievalUpdate], RetrievalUpdate] = lambda it: it) -> Any:
    """Return a search in two stages, of which the ``first`` may be made another, with time between them."""

    async def stages(vector: Any, k: int) -> AsyncGenerator[RetrievalUpdate, None]:
        found = store.search_vector(vector, k)
        yield first(replace(found, is_final=False))
        await asyncio.sleep(0.3)  # a longer search: what is sent ahead is on its way
        yield replace(found, stage=1)

    return stages


def test_a_search_in_stages_sends_nothing_ahead_unless_it_shall(
    store: SearchIndex, prompts: SearchedPrompts, demo_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "search_vector_staged", staged(store))
    searches, server = ask(prompts, demo_model, is_ours=True)
    assert {(s.num_stages, s.num_speculations, s.is_right) for s in searches} == {(2, 0, False)}
    assert [seen.body["kv_transfer_params"] for seen in asked(server)] == [prompts.request(i).params for i in range(4)]


@pytest.mark.parametrize("order", ["retrieval", "canonical"])
def test_a_speculation_that_is_right_is_the_request(
    store: SearchIndex, prompts: SearchedPrompts, demo_model: str, order: DocumentOrder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(store, "search_vector_staged", staged(store))
    searches, server = ask(prompts, demo_model, is_ours=True, speculates=True, order=order)
    assert {(s.num_stages, s.num_speculations, s.is_right) for s in searches} == {(2, 1, True)}
    assert [s for s in searches if not s.unhidden_s < s.search_s] == []
    assert len(asked(server)) == len(server.confirmed) == 4, "no request was sent twice"
    first, *_ = asked(server)
    found = [document.doc_id for document in prompts.documents(0)]
    shown = sorted(found) if order == "canonical" else found
    metadata = decode_kv_transfer_params(first.body["kv_transfer_params"], len(first.body["prompt"]))
    assert [s.doc_id for s in metadata.segments if s.doc_id] == shown


def test_a_speculation_that_is_wrong_is_given_up_for_what_the_search_ends_with(
    store: SearchIndex, prompts: SearchedPrompts, demo_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = store.search_vector(np.full(DIM, 9.0), 2)
    monkeypatch.setattr(store, "search_vector_staged", staged(store, lambda _: replace(wrong, is_final=False)))
    (search,), server = ask(prompts, demo_model, 1, is_ours=True, speculates=True)
    assert (search.num_speculations, search.is_right) == (1, False)
    assert search.unhidden_s == search.search_s
    assert asked(server)[-1].body["prompt"] == list(prompts.request(0).token_ids)
    assert (len(asked(server)), server.confirmed) == (2, [])


def test_a_runs_searches_are_added_up_and_read_back() -> None:
    found = SearchRun.of([Searched(0.2, 0.2, 1, 0, False), None, Searched(0.3, 0.1, 4, 2, True)])
    assert found == SearchRun((0.2, 0.3), (0.2, 0.1), 5, 1, 2, 1)
    assert SearchRun.from_dict(found.to_dict()) == found
    assert SearchRun.of([None]) is None
