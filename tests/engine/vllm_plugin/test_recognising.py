"""Registered documents in the requests of an API server: names, salts by rights, and what a client sees of it."""

from __future__ import annotations

import asyncio
import os
import stat
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ragcache_core.errors import ConfigError
from ragcache_core.recognition import MIN_TOKENS, PromptTexts
from ragcache_core.runtime.rights import joined_salt, rights_salt
from ragcache_core.runtime.tenants import Tenants, cache_salt_for
from ragcache_core.vllm_plugin.registrations import PersistentRegistrations
from ragcache_core.vllm_plugin.server.rank_choice import RankChoice
from ragcache_core.vllm_plugin.server.recognition.journal import RegistrationJournal
from ragcache_core.vllm_plugin.server.recognition.service import MAX_TEXT_CHARS
from ragcache_core.vllm_plugin.server.recognition.start import start_recognition
from ragcache_core.vllm_plugin.server.recognition.wrapper import Recogniser, attach
from ragcache_core.vllm_plugin.settings import PluginSettings
from ragcache_core.wire import KEY, encode_kv_transfer_params
from tests.unit.vllm_plugin.recognition_scene import (
    ACME,
    OTHER,
    SUIT,
    SUN,
    WAGES,
    EngineClient,
    Server,
    WordTokenizer,
    document,
    shown,
)


def run(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scene())


def tenants(tmp_path: Path, *, is_restricted: bool = False) -> Tenants:
    path = tmp_path / "tenants.toml"
    restricted = "restricted = true\n" * is_restricted
    path.write_text(
        f'[[tenants]]\nname = "acme"\nkeys = ["{ACME}"]\n{restricted}[[tenants]]\nname = "other"\nkeys = ["{OTHER}"]\n'
    )
    path.chmod(0o600)
    return Tenants.from_toml(path)


def test_a_plain_request_has_the_documents_that_it_shows_and_its_answer_says_nothing_of_them() -> None:
    async def scene() -> None:
        server = await Server().begin()
        assert await server.register(document("sun", SUN), document("suit", SUIT)) == [True, True]
        asked, seen = await server.ask(f"Read. \n {SUIT} \n {SUN} \n Who was sued?", params={"mine": 1})
        assert shown(asked) == ["suit", "sun"]
        assert asked.params["mine"] == 1
        assert "cache_salt" not in asked.prompt
        assert [each.kv_transfer_params for each in seen] == [{"mine": 1, "other": 1}] * 3
        asked, _ = await server.ask("Who was sued by Zorval in spring?")
        assert asked.params == {}
        counts = server.services[0].figures()
        assert (counts["num_prompts"], counts["num_recognised"], counts["num_unregistered"]) == (2, 2, 1)

    run(scene)


def test_a_request_with_spans_of_its_own_is_left_as_it_is() -> None:
    async def scene() -> None:
        server = await Server().begin()
        await server.register(document("sun", SUN))
        params = encode_kv_transfer_params(())
        asked, seen = await server.ask(SUN, params=params)
        assert asked.params == params
        assert KEY in seen[0].kv_transfer_params

    run(scene)


def test_an_answer_that_its_client_leaves_is_closed_in_the_engine() -> None:
    async def scene() -> None:
        server = await Server().begin()
        await server.register(document("sun", SUN))
        prompt = {"prompt_token_ids": server.tokenizer.encode(SUN, add_special_tokens=False)}
        answer = server.clients[0].generate(prompt, SimpleNamespace(extra_args=None), "r")
        await anext(answer)
        await answer.aclose()
        assert server.clients[0].num_closed == 1

    run(scene)


def test_one_bad_record_does_not_lose_the_others() -> None:
    async def scene() -> None:
        server = await Server().begin()
        bad: list[Any] = [
            document("", SUN),
            document("x" * 2000, SUN),
            document("long", "a " * MAX_TEXT_CHARS),
            document("half", f"{SUN} \ud800"),
            document("half \udfff", SUN),
            document("acl", SUN, ""),
            {"id": "acl", "text": SUN, "acl": "hr"},
            {"id": "more", "text": SUN, "other": 1},
            {"id": 3, "text": SUN},
            {"id": "no"},
            document("white", " \n "),
            document("short", "Two words"),
            None,
            [],
        ]
        results = await server.register(document("sun", SUN), *bad, document("nul", f"{SUIT} \0 and more"))
        assert results[0] is True
        assert results[-1] is True
        assert all(isinstance(each, str) for each in results[1:-1])
        asked, _ = await server.ask(f"{SUN} \n {SUIT} \0 and more")
        assert shown(asked) == ["sun", "nul"]

    run(scene)


def test_a_text_that_is_longer_than_every_prompt_is_refused_and_its_longer_forms_are_left_out() -> None:
    async def scene() -> None:
        server = Server()
        for service in server.services:
            service._tokenizer._max_tokens = 50
        await server.begin()
        lines = " \n ".join(f"line{i}" for i in range(20))
        results = await server.register(document("long", f"{SUN} " * 10), document("lines", lines))
        assert "split it" in results[0]
        assert results[1] is True
        assert shown((await server.ask(lines))[0]) == ["lines"]

    run(scene)


def test_control_tokens_in_a_document_are_reported() -> None:
    async def scene() -> None:
        server = await Server().begin()
        results = await server.services[0].register(None, [document("a", f"{SUN} <end> {SUIT}"), document("b", SUN)])
        assert [each.is_registered for each in results] == [True, True]
        assert "control tokens" in (results[0].warning or "")
        assert results[1].warning is None

    run(scene)


def test_duplicates_and_changed_texts_leave_one_document_with_its_last_text() -> None:
    async def scene() -> None:
        server = await Server().begin()
        assert await server.register(*[document("sun", SUN)] * 3) == [True] * 3
        before = server.kept.act("forget", {"ids": []})["last"]
        assert await server.register(document("sun", SUN)) == [True]
        assert server.kept.act("forget", {"ids": []})["last"] == before, "nothing has changed"
        await server.register(document("sun", SUIT))
        assert shown((await server.ask(SUN))[0]) == []
        assert shown((await server.ask(SUIT))[0]) == ["sun"]

    run(scene)


def test_restricted_documents_have_the_salt_of_their_groups_as_from_our_client() -> None:
    async def scene() -> None:
        server = await Server().begin()
        await server.register(document("wages", WAGES, "hr"), document("suit", SUIT, "legal", "hr"))
        rights = rights_salt([("hr",), ("hr", "legal")])
        assert rights is not None
        asked, _ = await server.ask(f"{WAGES} \n {SUIT}")
        assert asked.prompt["cache_salt"] == rights
        asked, _ = await server.ask(f"{WAGES} \n {SUIT} \n Who earns more than others at Zorval?", salt="mine")
        assert asked.prompt["cache_salt"] == joined_salt(["mine", rights])

    run(scene)


def test_unregistered_and_altered_texts_are_never_hit_across_groups() -> None:
    async def scene() -> None:
        server = await Server().begin()
        text = f"{SUIT} \n Who was sued by whom in which year?"
        asked, _ = await server.ask(text)
        assert "cache_salt" not in asked.prompt, "no document is restricted yet"
        await server.register(document("wages", WAGES, "hr"), document("sun", SUN))
        altered = WAGES.replace("thirty", "forty")
        unsure = [text, altered, f"{SUN} \n {altered}", f"{altered} \n {SUN}", f"{SUN} \n {WAGES} \n {SUIT}", SUIT]
        salts = [(await server.ask(each))[0].prompt["cache_salt"] for each in unsure for _ in range(2)]
        assert len(set(salts)) == len(salts), "no two requests share KV"
        assert (await server.ask(altered))[0].params["max_offload_tokens"] == 0, "nothing is stored for no reader"
        for sure in (SUN, f"{SUN} \n {SUN}", f"Read this. \n {SUN}"):
            assert "cache_salt" not in (await server.ask(sure))[0].prompt
        assert (await server.ask(text, salt="hr-app"))[0].prompt["cache_salt"] == "hr-app", "a salt says who shares"
        assert server.services[0].figures()["num_private"] == len(salts) + 1

    run(scene)


def test_a_run_of_unknown_tokens_as_long_as_the_shortest_document_is_private() -> None:
    async def scene() -> None:
        server = await Server().begin()
        await server.register(document("wages", WAGES, "hr"), document("sun", SUN))
        for num_words in (MIN_TOKENS - 1, MIN_TOKENS):
            words = " ".join(f"unknown{i}" for i in range(num_words))
            asked, _ = await server.ask(f"{SUN} {words}")
            assert ("cache_salt" in asked.prompt) == (num_words == MIN_TOKENS)

    run(scene)


def test_a_client_of_ours_that_does_not_know_the_rights_has_their_salt() -> None:
    async def scene() -> None:
        server = await Server().begin()
        await server.register(document("wages", WAGES, "hr"))
        params = encode_kv_transfer_params(())
        asked, _ = await server.ask(f"{WAGES} \n Who?", params=params)
        assert asked.prompt["cache_salt"] == rights_salt([("hr",)])
        asked, _ = await server.ask(f"{SUIT} \n Who was sued in spring?", params=params)
        assert "cache_salt" not in asked.prompt, "it says itself what its prompts may share"

    run(scene)


def test_tenants_have_documents_of_their_own_and_find_no_others(tmp_path: Path) -> None:
    async def scene() -> None:
        known = tenants(tmp_path)
        server = await Server(tenants=known).begin()
        salts = {name: cache_salt_for(name) for name in ("acme", "other")}
        await server.register(document("of-acme", SUN), tenant="acme")
        await server.register(document("of-all", SUIT))
        assert shown((await server.ask(f"{SUN} \n {SUIT}", salts["acme"]))[0]) == ["of-acme", "of-all"]
        assert shown((await server.ask(f"{SUN} \n {SUIT}", salts["other"]))[0]) == ["of-all"]
        assert shown((await server.ask(f"{SUN} \n {SUIT}"))[0]) == ["of-all"]
        await server.register(document("copy", SUN), tenant="other")
        assert shown((await server.ask(SUN, salts["acme"]))[0]) == ["of-acme"]
        assert shown((await server.ask(SUN, salts["other"]))[0]) == ["copy"]

    run(scene)


def test_a_tenants_rights_are_within_its_salt_and_do_not_reach_others(tmp_path: Path) -> None:
    async def scene() -> None:
        known = tenants(tmp_path)
        server = await Server(tenants=known).begin()
        await server.register(document("wages", WAGES, "hr"), tenant="acme")
        asked, _ = await server.ask(WAGES, cache_salt_for("acme"))
        assert asked.prompt["cache_salt"] == cache_salt_for("acme", rights_salt([("hr",)])), "as from our client"
        private = [
            (await server.ask(f"{SUIT} \n Who?", cache_salt_for("acme")))[0].prompt["cache_salt"] for _ in range(2)
        ]
        assert len({cache_salt_for("acme"), *private}) == 3
        assert {salt.rpartition("-")[0] for salt in private} == {cache_salt_for("acme").rpartition("-")[0]}
        assert (await server.ask(f"{SUIT} \n Who?", cache_salt_for("other")))[0].prompt["cache_salt"] == cache_salt_for(
            "other"
        )
        own = cache_salt_for("acme", "mine")
        assert (await server.ask(f"{SUIT} \n Who?", own))[0].prompt["cache_salt"] == own
        assert (await server.ask(WAGES, own))[0].prompt["cache_salt"] not in (own, asked.prompt["cache_salt"])

    run(scene)


def test_a_restricted_tenant_is_private_without_any_registration(tmp_path: Path) -> None:
    async def scene() -> None:
        server = await Server(tenants=tenants(tmp_path, is_restricted=True)).begin()
        for name, is_private in (("acme", True), ("other", False)):
            asked, _ = await server.ask(f"{WAGES} \n Who?", cache_salt_for(name))
            assert (asked.prompt["cache_salt"] != cache_salt_for(name)) == is_private

    run(scene)


def test_every_api_server_knows_a_restricted_document_when_its_registration_returns() -> None:
    async def scene() -> None:
        server = await Server(num_servers=2).begin()
        following = asyncio.create_task(server.services[1].follow())
        try:
            assert await server.register(document("wages", WAGES, "hr")) == [True]
            asked, _ = await server.ask(WAGES, server=1)
            assert shown(asked) == ["wages"]
            assert asked.prompt["cache_salt"] == rights_salt([("hr",)])
            assert server.services[1].figures()["num_documents"] == 1
        finally:
            following.cancel()

    run(scene)


def test_a_server_without_acl_support_is_reported_for_restricted_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ragcache_core.vllm_plugin.server.recognition.service._EVERYWHERE_S", 0.1)

    async def scene() -> None:
        server = await Server(num_servers=2).begin()
        results = await server.register(document("wages", WAGES, "hr"), document("sun", SUN))
        assert "register it again" in results[0]
        assert results[1] is True

    run(scene)


def test_registrations_survive_a_restart_and_forgotten_ones_do_not(tmp_path: Path) -> None:
    async def scene() -> None:
        path = tmp_path / "kv" / "registrations.journal"
        server = await Server(path=path).begin()
        await server.register(document("wages", WAGES, "hr"), document("sun", SUN), document("suit", SUIT))
        assert await server.services[0].forget({"sun"}) == ()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert b"sun" not in path.read_bytes()
        await server.register(document("more", f"{SUIT} {SUN}"))

        again = Server(path=path)
        again.tokenizer._ids = server.tokenizer._ids
        await again.begin()
        assert shown((await again.ask(WAGES))[0]) == ["wages"]
        assert shown((await again.ask(f"{SUIT} \n {SUN}"))[0]) == ["suit"]
        assert shown((await again.ask(f"{SUIT} {SUN}"))[0]) == ["more"]
        assert (await again.ask(WAGES))[0].prompt["cache_salt"] == rights_salt([("hr",)])
        await again.services[0].forget({"wages", "suit", "more"})

        last = await Server(path=path).begin()
        assert "cache_salt" in (await last.ask(WAGES))[0].prompt, "a tenant stays restricted"

    run(scene)


def test_a_file_does_not_grow_with_texts_that_are_replaced(tmp_path: Path) -> None:
    async def scene() -> None:
        path = tmp_path / "registrations.journal"
        server = await Server(path=path).begin()
        sizes = []
        for i in range(1200):
            await server.register(document("sun", f"{SUN} Now it is {i} ."))
            sizes.append(path.stat().st_size)
        assert max(sizes) < 1100 * 250
        assert sizes[-1] < max(sizes) / 2
        again = Server(path=path)
        again.tokenizer._ids = server.tokenizer._ids
        await again.begin()
        assert shown((await again.ask(f"{SUN} Now it is 1199 ."))[0]) == ["sun"]

    run(scene)


def test_a_file_that_a_crash_has_cut_off_loses_its_last_record_alone(tmp_path: Path) -> None:
    async def scene() -> None:
        path = tmp_path / "registrations.journal"
        server = await Server(path=path).begin()
        await server.register(document("sun", SUN))
        await server.register(document("wages", WAGES))
        path.write_bytes(path.read_bytes()[:-5])
        for number, text in enumerate((SUIT, f"{SUIT} {SUN}")):
            again = Server(path=path)
            again.tokenizer._ids = server.tokenizer._ids
            await again.begin()
            assert shown((await again.ask(SUN))[0]) == ["sun"]
            assert shown((await again.ask(WAGES))[0]) == []
            assert shown((await again.ask(SUIT))[0]) == ["0"] * number
            await again.register(document(str(number), text))

    run(scene)


def test_a_damaged_file_keeps_plain_requests_apart(tmp_path: Path) -> None:
    async def scene() -> None:
        path = tmp_path / "registrations.journal"
        server = await Server(path=path).begin()
        await server.register(document("wages", WAGES, "hr"))
        path.write_bytes(damaged := path.read_bytes().replace(b"wages", b"wagez"))
        for _ in range(2):  # and so it stays
            again = await Server(path=path).begin()
            salts = {(await again.ask(f"{SUIT} \n Who?"))[0].prompt["cache_salt"] for _ in range(2)}
            assert len(salts) == 2
        assert path.with_suffix(".damaged").read_bytes() == damaged

    run(scene)


def test_of_too_many_documents_those_unseen_for_longest_are_dropped() -> None:
    async def scene() -> None:
        server = await Server(limit=3).begin()
        texts = {f"d{i}": f"{SUN} Number {i} of {i} is {i} ." for i in range(5)}
        for name, text in list(texts.items())[:3]:
            await server.register(document(name, text))
        assert shown((await server.ask(texts["d0"]))[0]) == ["d0"]
        for name, text in list(texts.items())[3:]:
            await server.register(document(name, text))
        found = {name for name, text in texts.items() if shown((await server.ask(text))[0]) == [name]}
        assert found == {"d0", "d3", "d4"}
        assert server.services[0].figures()["num_documents"] == 3

    run(scene)


def test_documents_that_differ_too_little_are_reported() -> None:
    async def scene() -> None:
        server = await Server().begin()
        results = await server.register(
            *[document(f"d{i}", f"{chr(97 + i // 26)}{chr(97 + i % 26)} {SUN}") for i in range(70)]
        )
        refused = [each for each in results if each is not True]
        assert len(refused) == 70 - 64
        assert all("first and last words" in each for each in refused)

    run(scene)


def test_documents_in_a_request_are_registered_before_it_is_looked_up() -> None:
    async def scene() -> None:
        server = await Server().begin()
        inline = {KEY: {"register": [document("wages", WAGES, "hr")]}}
        asked, _ = await server.ask(f"{WAGES} \n Who?", params=inline)
        assert shown(asked) == ["wages"]
        assert asked.prompt["cache_salt"].startswith("acl-")
        assert "register" not in asked.params[KEY]
        for bad in ([document("", SUN)], {"id": "a"}, [document("a", SUN)] * 5000):
            with pytest.raises(ValueError, match="register"):
                await server.ask(SUN, params={KEY: {"register": bad}})

    run(scene)


def test_several_engines_get_what_shows_the_same_documents_in_one_of_them() -> None:
    async def scene() -> None:
        server = await Server().begin(choice=RankChoice(2))
        await server.register(document("sun", SUN), document("suit", SUIT))
        ranks = {text: {(await server.ask(text))[0].rank for _ in range(4)} for text in (SUN, SUIT)}
        assert all(len(each) == 1 and None not in each for each in ranks.values())
        assert ranks[SUN] != ranks[SUIT]
        assert (await server.ask("Nothing that is registered here."))[0].rank is None

    run(scene)


def test_a_document_that_is_forgotten_while_prompts_are_recognised_is_not_named_afterwards() -> None:
    async def scene() -> None:
        server = await Server().begin()
        await server.register(document("sun", SUN), document("suit", SUIT))

        async def keep_sending() -> None:
            for _ in range(50):
                await server.ask(f"{SUN} \n {SUIT}")

        asking = [asyncio.create_task(keep_sending()) for _ in range(4)]
        await asyncio.sleep(0)
        await server.services[0].forget({"sun"})
        later = len(server.clients[0].asked)
        await asyncio.gather(*asking)
        assert 0 < later < 200
        assert all(shown(asked) == ["suit"] for asked in server.clients[0].asked[later:])

    run(scene)


@pytest.mark.parametrize("kind", ["no generator", "other arguments", "fixed"])
def test_a_release_that_refuses_the_wrapper_is_reported_once_and_left_as_it_is(
    kind: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Coroutines(EngineClient):
        async def generate(self, prompt: Any, sampling_params: Any, request_id: str) -> Any:  # type: ignore[override]
            return None

    class Renamed(EngineClient):
        async def generate(self, inputs: Any, sampling_params: Any, request_id: str) -> AsyncGenerator[Any, None]:  # type: ignore[override]
            yield None

    class Fixed(EngineClient):
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "generate":
                raise AttributeError("read-only")
            super().__setattr__(name, value)

    client = {"no generator": Coroutines, "other arguments": Renamed, "fixed": Fixed}[kind]()
    warned: Sequence[str] = (said := [])
    monkeypatch.setattr(
        "ragcache_core.vllm_plugin.server.recognition.wrapper.logger",
        SimpleNamespace(warning=lambda text, *args: said.append(text % args)),
    )
    before = client.generate
    service = Server().services[0]
    assert not attach(client, Recogniser(service))
    assert client.generate == before
    assert len(warned) == 1
    assert "RC-RECOGNITION-OFF" in warned[0]


def start(client: Any, known: Tenants | None, monkeypatch: pytest.MonkeyPatch, call: Any, **settings: Any) -> Any:
    """Start recognition as the server does, with a way to the engine core's log."""
    monkeypatch.setattr("ragcache_core.vllm_plugin.server.recognition.start.call_registrations", call)
    parallel = SimpleNamespace(data_parallel_rank=0, _api_process_rank=0, _api_process_count=1)
    model = SimpleNamespace(max_model_len=4096)
    client.vllm_config = SimpleNamespace(parallel_config=parallel, model_config=model)
    client.renderer = SimpleNamespace(get_tokenizer=WordTokenizer)
    return asyncio.run(start_recognition(client, PluginSettings(**settings), known, None))


def test_a_server_whose_engine_keeps_no_registrations_runs_without_and_refuses_restricted_tenants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    log = SimpleNamespace(warning=lambda text, *args: said.append(text % args))
    monkeypatch.setattr("ragcache_core.vllm_plugin.server.recognition.start.logger", log)

    async def missing(*arguments: Any) -> dict[str, Any]:
        raise RuntimeError("the engine core has no such method")

    client = EngineClient()
    started = start(client, tenants(tmp_path), monkeypatch, missing)
    assert (started.service, started.following) == (None, None)
    assert started.texts is not None, "clients may name their documents"
    assert len(said) == 1
    assert "RC-RECOGNITION-OFF" in said[0]
    for settings in ({}, {"max_documents": 0}):
        with pytest.raises(ConfigError, match="acme of the tenants' file are restricted"):
            start(EngineClient(), tenants(tmp_path, is_restricted=True), monkeypatch, missing, **settings)


def test_recognition_starts_with_the_file_beside_the_disk_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def kept(client: Any, action: str, body: dict[str, Any]) -> dict[str, Any]:
        return log.act(action, body)

    for _ in range(2):
        log, client = PersistentRegistrations(), EngineClient()
        started = start(client, None, monkeypatch, kept, directory=tmp_path / "kv", disk_bytes=1 << 20)
        assert started.service is not None
        assert started.following is None
    assert [path.suffix for path in (tmp_path / "kv").iterdir()] == [".journal"]


def named(*documents: tuple[str, str], **options: Any) -> dict[str, Any]:
    return {KEY: {"version": 1, "documents": [{"id": i, "text": text} for i, text in documents], **options}}


@pytest.mark.parametrize("has_registrations", [True, False])
def test_documents_that_a_client_names_by_their_texts_are_found_in_the_tokens(has_registrations: bool) -> None:
    async def scene() -> None:
        server = await Server().begin()
        texts = PromptTexts(None, lambda text: server.tokenizer.encode(text, add_special_tokens=False))
        client = server.clients[0]
        client.generate = EngineClient.generate.__get__(client)
        assert attach(client, Recogniser(server.services[0] if has_registrations else None, texts=texts))
        params = named(("a", SUN), ("not there", SUIT), ("b", WAGES), reordered=True)
        asked, seen = await server.ask(f"Answer. {SUN} \n {WAGES} Why?", params=params)
        assert shown(asked) == ["a", "b"]
        first, second = asked.params[KEY]["documents"]
        size = len(server.tokenizer.encode(SUN, add_special_tokens=False))
        assert abs(first["end"] - first["start"] - size) <= 1
        assert first["end"] <= second["start"]
        assert "text" not in first
        assert asked.params[KEY]["reordered"] is True
        assert KEY in seen[0].kv_transfer_params
        asked, _ = await server.ask("Nothing of it.", params=named(("a", SUN)))
        assert asked.params[KEY]["documents"] == []

    run(scene)


def test_a_text_that_a_client_names_does_not_make_a_restricted_prompt_share(tmp_path: Path) -> None:
    async def scene() -> None:
        server = await Server(tenants=tenants(tmp_path)).begin()
        await server.register(document("wages", WAGES, "hr"), tenant="acme")
        asked, _ = await server.ask(WAGES, cache_salt_for("acme"), named(("public", WAGES)))
        assert asked.prompt["cache_salt"] != cache_salt_for("acme"), "its rights are those of the registered document"

    run(scene)


def test_texts_that_the_prompt_does_not_show_do_not_make_it_share(tmp_path: Path) -> None:
    async def scene() -> None:
        server = await Server(tenants=tenants(tmp_path, is_restricted=True)).begin()
        altered = f"{WAGES} \n Who earns what?"
        asked, _ = await server.ask(altered, cache_salt_for("acme"), named(("public", SUN)))
        assert asked.prompt["cache_salt"] != cache_salt_for("acme")
        again, _ = await server.ask(altered, cache_salt_for("acme"), named(("public", SUN)))
        assert again.prompt["cache_salt"] != asked.prompt["cache_salt"], "nor with itself"

    run(scene)


def test_options_in_the_metadata_of_a_plain_request_do_not_make_it_share(tmp_path: Path) -> None:
    async def scene() -> None:
        server = await Server(tenants=tenants(tmp_path, is_restricted=True)).begin()
        await server.register(document("sun", SUN), tenant="acme")
        for own in ({"version": 1}, {"version": 1, "chunk_reuse": True}, None, {}, "no object"):
            inline = {**own, "register": [document("suit", SUIT)]} if isinstance(own, dict) else own
            for metadata in (own, inline):
                asked, _ = await server.ask(f"{SUN} \n {WAGES}", cache_salt_for("acme"), {KEY: metadata})
                assert asked.prompt["cache_salt"] != cache_salt_for("acme")
        asked, seen = await server.ask(SUN, cache_salt_for("acme"), {KEY: {"version": 1, "chunk_reuse": True}})
        assert shown(asked) == ["sun"]
        assert asked.params[KEY]["chunk_reuse"] is True
        assert KEY in seen[0].kv_transfer_params, "it has asked for them"

    run(scene)


def test_the_salt_of_a_clients_groups_does_not_give_way_to_that_of_other_groups() -> None:
    async def scene() -> None:
        server = await Server().begin()
        await server.register(document("wages", WAGES, "hr"))
        hr, both = rights_salt([("hr",)]), rights_salt([("hr",), ("legal",)])
        text = f"{WAGES} \n {SUIT}"
        salts = [(await server.ask(text, salt))[0].prompt["cache_salt"] for salt in (hr, both, both, "mine")]
        assert salts[0] == hr
        assert salts[1] == salts[2]
        assert len({*salts, both}) == 4, "what also shows a text for legal is not for all of hr"

    run(scene)


def test_a_restricted_document_is_registered_once_all_servers_and_the_disk_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = "ragcache_core.vllm_plugin.server.recognition.service"
    monkeypatch.setattr(f"{where}._EVERYWHERE_S", 0.1)
    monkeypatch.setattr(f"{where}._REWRITE_S", 0.0)

    async def scene() -> None:
        path = tmp_path / "kv" / "registrations-1.journal"
        server = await Server(num_servers=2, path=path).begin()
        wages, sun = document("wages", WAGES, "hr"), document("sun", SUN)
        for _ in range(2):  # it is no less unknown to the other server when it is sent again
            results = await server.register(wages, sun)
            assert "register it again" in results[0]
            assert results[1] is True
        await server.services[1].pull()
        assert await server.register(wages) == [True]

        for i, service in enumerate(server.services):  # the other servers learn it from the engine core
            following = asyncio.create_task(server.services[1 - i].follow())
            path.unlink()
            path.mkdir()  # not even root can write it
            suit = document(f"suit-{i}", f"{SUIT} {i} {i}", "legal")
            for _ in range(2):
                results = [each.error or "" for each in await service.register(None, [suit, sun])]
                assert "on disk" in results[0]
                assert results[1] == ""
            assert any("on disk" in each for each in await service.forget({"sun"}))
            path.rmdir()
            for _ in range(2):  # the second one tells of what the first one has written
                await server.services[0].pull()
            assert [each.error for each in await service.register(None, [suit])] == [None]
            following.cancel()
        again = await Server(path=path).begin()
        assert again.services[0].figures()["num_documents"] == 3
        assert again.services[0].is_restricted(None)

    monkeypatch.setattr(f"{where}._POLL_S", 0.01)
    run(scene)


def test_restricted_tenants_stay_so_with_another_tokenizer_and_when_nothing_can_be_written(tmp_path: Path) -> None:
    async def scene() -> None:
        path, other = tmp_path / "registrations-1.journal", tmp_path / "registrations-2.journal"
        server = await Server(path=path).begin()
        await server.register(document("wages", WAGES, "hr"))
        for _ in range(2):
            assert (await Server(path=other).begin()).services[0].is_restricted(None)
            path.unlink(missing_ok=True)
        other.write_bytes(other.read_bytes()[:20])
        blocked = tmp_path / f".{other.name}.{os.getpid()}.new"
        blocked.mkdir()  # as if the disk were full
        for _ in range(2):
            assert (await Server(path=other).begin()).services[0].is_restricted("acme")
        blocked.rmdir()
        for _ in range(2):
            assert (await Server(path=other).begin()).services[0].is_restricted("acme")

    run(scene)


def test_a_client_that_leaves_does_not_interrupt_what_it_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        path = tmp_path / "registrations.journal"
        server = await Server(path=path).begin()
        await server.register(document("sun", SUN))
        begun, may_go_on, ended = (threading.Event() for _ in range(3))
        rewrite = RegistrationJournal.rewrite

        def slow(*arguments: Any) -> None:
            begun.set()
            may_go_on.wait(10)
            rewrite(*arguments)
            ended.set()

        monkeypatch.setattr(RegistrationJournal, "rewrite", slow)
        leaving = asyncio.create_task(server.services[0].forget({"sun"}))
        await asyncio.to_thread(begun.wait, 10)
        leaving.cancel()
        registering = asyncio.create_task(server.register(document("wages", WAGES, "hr")))
        await asyncio.wait([registering], timeout=0.2)
        may_go_on.set()
        assert await registering == [True]
        await asyncio.to_thread(ended.wait, 10)
        assert (await Server(path=path).begin()).services[0].is_registered("wages")

    run(scene)


def test_a_known_document_in_a_request_asks_nothing_of_the_engine() -> None:
    async def scene() -> None:
        server = await Server().begin()
        inline = {KEY: {"register": [document("wages", WAGES, "hr"), document("sun", SUN)]}}
        await server.ask(WAGES, params=inline)
        asked: list[str] = []
        act = server.kept.act

        def noting(action: str, body: Any) -> dict[str, Any]:
            asked.append(action)
            return act(action, body)

        server.kept.act = noting  # type: ignore[method-assign]
        for _ in range(3):
            assert shown((await server.ask(WAGES, params=inline))[0]) == ["wages"]
        assert asked == []

    run(scene)


def test_a_restricted_document_that_cannot_be_registered_makes_its_tenant_restricted(tmp_path: Path) -> None:
    async def scene() -> None:
        for i, bad in enumerate((document("wages", "Two words", "hr"), document("wages", WAGES, *["g" * 200] * 2, ""))):
            path = tmp_path / str(i) / "registrations-1.journal"
            server = await Server(path=path).begin()
            assert await server.register(document("", SUN)) != [True]
            assert not server.services[0].is_restricted(None)
            assert await server.register(bad) != [True]
            assert "cache_salt" in (await server.ask(WAGES))[0].prompt
            assert (await Server(path=path).begin()).services[0].is_restricted(None)
        many = document("many", WAGES, *[f"{i:0200}" for i in range(30)])
        assert "6000 characters, the limit is 4096" in (await server.register(many))[0]

    run(scene)


def test_a_document_indistinguishable_from_64_others_is_refused_each_time() -> None:
    async def scene() -> None:
        server = await Server().begin()
        same = [document(f"d{i}", "word " * (10 + i)) for i in range(66)]
        results = [(await server.register(each))[0] for each in same]
        assert results[:64] == [True] * 64
        for _ in range(2):
            for each in same[64:]:
                assert "64 other documents" in (await server.register(each))[0]

    run(scene)


@pytest.mark.parametrize("token", [-1, 1 << 31, 1 << 40])
def test_a_token_id_that_no_vocabulary_has_is_refused_with_its_place_and_the_limit(token: int) -> None:
    async def scene() -> None:
        server = await Server().begin()
        sampling = SimpleNamespace(extra_args=None)
        with pytest.raises(ValueError, match=rf"token 2 of the prompt is {token}; a token id is 0 to 2147483647"):
            async for _ in server.clients[0].generate({"prompt_token_ids": [1, 2, token]}, sampling, "r"):
                pass

    run(scene)
