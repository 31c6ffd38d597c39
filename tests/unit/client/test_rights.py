"""Documents with an ``acl``: whose prompts share KV, whichever way they are shown."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_core import ConfigError, Document, PromptLayout
from ragcache_core.client import Engine
from ragcache_core.client.prompts.bound_prompt import KVScope
from ragcache_core.client.prompts.request_plan import DocumentFacts, RememberedDocuments, merge_bodies
from ragcache_core.client.prompts.retrieved_documents import RETRIEVED
from ragcache_core.runtime.rights import joined_salt, rights_salt
from tests.support.scripted_server import ScriptedServer

LAYOUT = PromptLayout()
SUN = Document("sun", "The sun is a star, and every planet goes around it in its own time.")
WAGES = Document("wages", "No one at Zorval earns more than thirty times what the youngest one earns.", acl=["hr"])
SUIT = Document("suit", "Zorval was sued in spring, and has offered to pay a third of what was asked.", acl=["legal"])
BOTH = Document("both", "Who leaves Zorval keeps quiet about it for two years and gets a car.", acl=["legal", "hr"])


@pytest.fixture(autouse=True)
def nothing_retrieved(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this process has retrieved before the test is not known."""
    monkeypatch.setattr(RETRIEVED, "facts", DocumentFacts())


def asked(server: ScriptedServer) -> Any:
    """Return the salt with which the last request was sent."""
    return server.requests[-1].body.get("cache_salt")


# A document's groups


def test_groups_are_sorted_and_in_the_metadata_so_that_stores_and_frameworks_carry_them() -> None:
    assert BOTH.acl == ("hr", "legal")
    assert BOTH.metadata == {"acl": ["hr", "legal"]}
    assert Document("d", "text", {"acl": ["b", "a", "b"], "title": "t"}).acl == ("a", "b")
    again = Document(BOTH.doc_id, BOTH.text, dict(BOTH.metadata))
    assert again == BOTH
    assert (SUN.acl, dict(SUN.metadata)) == (None, {})


@pytest.mark.parametrize("acl", ["hr", b"hr", [], [""], [7], ["x" * 257], {"hr": 1}, 7, ["g"] * 1025, [None]])
def test_groups_that_are_none_are_refused(acl: Any) -> None:
    for make in (lambda: Document("d", "text", acl=acl), lambda: Document("d", "text", {"acl": acl})):
        with pytest.raises(ConfigError, match=r"the acl of document 'd' is .* must be a list of 1 to 1024 names"):
            make()


def test_a_store_keeps_groups(tmp_path: Path) -> None:
    from ragcache_core.retrieval import DocumentStore

    with DocumentStore.create(tmp_path / "store", index="flat") as store:
        store.add([SUN, WAGES])
        assert {d.doc_id: d.acl for d in store.search("Zorval", k=2).documents} == {"sun": None, "wages": ("hr",)}


# Who shares


acls = st.lists(
    st.one_of(st.none(), st.lists(st.sampled_from(["a", "b", "c", "a,b"]), min_size=1, max_size=3)), max_size=3
)


@given(acls, acls)
def test_two_prompts_have_the_same_salt_where_their_documents_ask_for_the_same_groups(one: Any, other: Any) -> None:
    def needed(lists: Any) -> set[frozenset[str]]:
        return {frozenset(groups) for groups in lists if groups is not None}

    salts = [
        rights_salt(tuple(sorted(set(groups))) for groups in lists if groups is not None) for lists in (one, other)
    ]
    assert (salts[0] == salts[1]) == (needed(one) == needed(other))
    assert (salts[0] is None) == (not needed(one))


def test_a_reader_of_one_group_shares_nothing_with_a_reader_of_both(engine: Engine) -> None:
    prompts = [[SUN], [SUN, WAGES], [WAGES], [WAGES, SUIT], [BOTH], [SUN, BOTH, WAGES]]
    salts = [
        engine.integration.prompts.plan_rendered(
            LAYOUT.render(engine.tokenizer, documents, "What is it?")
        ).extra_body.get("cache_salt")
        for documents in prompts
    ]
    assert salts[0] is None
    assert salts[1] == salts[2] is not None
    assert len({*salts}) == 5
    assert all(one != other for one, other in pairwise([*salts[:2], *salts[3:]]))


def test_a_salt_of_ones_own_is_joined_with_that_of_the_rights_in_any_order() -> None:
    rights = rights_salt([("hr",)])
    assert rights is not None
    joined = joined_salt(["mine", rights])
    assert joined == joined_salt([rights, "mine"]) == joined_salt(["another", "mine", rights])
    assert joined not in (None, "mine", rights, joined_salt(["another", rights]))
    assert joined_salt([rights]) == rights
    assert joined_salt(["a", "b"]) == "b"
    assert joined_salt([]) is None
    assert merge_bodies({"cache_salt": rights, "a": 1}, {"cache_salt": "mine"}) == {"cache_salt": joined, "a": 1}
    assert merge_bodies({"cache_salt": "a"}, {"cache_salt": "b"}) == {"cache_salt": "b"}


# Every way in which a document is shown


def test_a_prompt_that_is_laid_out_is_asked_prefetched_and_warmed_with_its_salt(
    engine: Engine, server: ScriptedServer
) -> None:
    prompt = LAYOUT.render(engine.tokenizer, [WAGES], "Who earns what?")
    engine.generate(prompt)
    assert asked(server) == rights_salt([("hr",)])
    engine.generate(prompt, extra_body={"cache_salt": "mine"})
    assert asked(server) == joined_salt(["mine", rights_salt([("hr",)]) or ""])
    engine.generate(LAYOUT.render(engine.tokenizer, [SUN], "What is the sun?"))
    assert asked(server) is None
    bound = engine.bind_prompt(LAYOUT)
    prefix = bound.prefix([WAGES], [WAGES])
    assert prefix is not None
    captured = engine.integration.speculation.prepare_warm(prefix, scope=KVScope())._captured
    assert rights_salt([("hr",)]).encode() in captured.body  # type: ignore[union-attr]  # a salt there is


def test_a_chat_that_shows_a_document_is_asked_with_its_salt(engine: Engine, server: ScriptedServer) -> None:
    engine.remember_documents([WAGES, SUN])
    for text, salt in ((WAGES.text, rights_salt([("hr",)])), (SUN.text, None), (f"{SUN.text} {SUIT.text}", None)):
        engine.generate([{"role": "user", "content": f"{text}\n\nWho?"}])
        assert asked(server) == salt
    plan = engine.integration.prompts.plan_chat([{"role": "user", "content": SUIT.text}], documents=[SUIT])
    assert plan.extra_body["cache_salt"] == rights_salt([("legal",)])


def test_a_chat_that_the_server_renders_is_asked_with_its_salt(demo_model: str) -> None:
    with (
        ScriptedServer(api_key="secret", root=demo_model) as server,
        Engine.connect(server.url, api_key="secret", tokenizer=False) as engine,
    ):
        engine.remember_documents([WAGES, SUN])
        engine.generate([{"role": "user", "content": f"{WAGES.text}\n\nWho?"}])
        assert asked(server) == rights_salt([("hr",)])
        engine.generate([{"role": "user", "content": f"{SUN.text}\n\nWho?"}])
        assert asked(server) is None


def test_of_documents_with_the_same_id_no_groups_are_forgotten() -> None:
    remembered = RememberedDocuments()
    remembered.add([WAGES])
    remembered.add([Document("wages", "of another store")])
    remembered.add([Document("wages", "of a third", acl=["legal"])])
    assert remembered.facts.acls_of(["wages", None, "unknown"]) == {("hr",), ("legal",)}


def test_documents_of_any_retriever_count_for_every_engine_of_the_process() -> None:
    one, other = DocumentFacts(RETRIEVED.facts), DocumentFacts(RETRIEVED.facts)
    RETRIEVED.facts.add([WAGES])
    one.add([SUIT])
    assert one.acls_of(["wages", "suit"]) == {("hr",), ("legal",)}
    assert other.acls_of(["wages", "suit"]) == {("hr",)}
    assert one.has_acls
    assert not DocumentFacts().has_acls
