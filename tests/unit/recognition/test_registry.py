"""Documents are found where a prompt shows them whole, and nowhere else."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from ragcache_core.recognition import (
    PolynomialHash,
    Recognition,
    Registration,
    Registry,
    bytes_of_tokens,
    count_edges,
    find_documents,
    text_forms,
)
from ragcache_core.recognition.registry import MAX_SAME_CONTENT

WORDS = [f"w{i}" for i in range(500)]


class Scene:
    """Registries of a tenant and of the operator, over a tokenizer that merges a word with what follows it."""

    def __init__(self, *, knows_bytes: bool = True) -> None:
        self.vocabulary: dict[str, int] = {}
        self.hashing = PolynomialHash.random()
        self._bytes: list[bytes] | None = [] if knows_bytes else None
        self.tenant, self.operator = (Registry(self.hashing, self._bytes) for _ in range(2))

    def encode(self, text: str) -> list[int]:
        """Return pairs of characters as tokens, from each space on: what follows a word changes its last token."""
        tokens = []
        for word in text.replace(" ", "\0 ").split("\0"):
            for i in range(0, len(word), 2):
                piece = word[i : i + 2]
                if piece not in self.vocabulary:
                    self.vocabulary[piece] = len(self.vocabulary)
                    if self._bytes is not None:
                        self._bytes.append(piece.encode())
                tokens.append(self.vocabulary[piece])
        return tokens

    def registration(self, doc_id: str, text: str, acl: Sequence[str] | None = None) -> Registration:
        forms = [
            form
            for each in text_forms(text)
            if (form := self.tenant.make_form(self.encode(each), count_edges(self.encode, each))) is not None
        ]
        return Registration(doc_id, tuple(forms), None if acl is None else tuple(acl))

    def register(self, doc_id: str, text: str, acl: Sequence[str] | None = None, *, of_operator: bool = False) -> bool:
        return (self.operator if of_operator else self.tenant).add(self.registration(doc_id, text, acl))

    def find(self, prompt: str) -> Recognition:
        return find_documents(self.hashing, [self.tenant, self.operator], self.encode(prompt))

    def shown(self, prompt: str) -> list[tuple[str, str]]:
        """Return the documents in a prompt, each with the text of its tokens."""
        tokens = self.encode(prompt)
        texts = {number: piece for piece, number in self.vocabulary.items()}
        return [(d.doc_id, "".join(texts[t] for t in tokens[d.start : d.end])) for d in self.find(prompt).documents]


def text_of(seed: str, num_words: int = 30) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=num_words))


@pytest.mark.parametrize("frame", ["{}\n\n{}", "{} {}", "<doc>{}</doc><doc>{}</doc>", '["{}", "{}"]', "1.{}2.{}3."])
def test_documents_are_found_in_every_layout(frame: str) -> None:
    scene = Scene()
    texts = {name: text_of(name) for name in ("one", "other", "third")}
    for name, text in texts.items():
        assert scene.register(name, text)

    shown = scene.shown(f"Read this. {frame.format(texts['other'], texts['one'])} What is w3?")

    assert [doc_id for doc_id, _ in shown] == ["other", "one"]
    for doc_id, text in shown:
        assert text[4:-4] in texts[doc_id]
        assert abs(len(text) - len(texts[doc_id])) <= 2


def test_an_altered_or_unregistered_text_is_not_found_and_reported_as_unknown() -> None:
    scene = Scene()
    text = text_of("one")
    scene.register("one", text)

    words = text.split()
    altered = " ".join([*words[:15], "altered", *words[16:]])
    found = scene.find(f"Read. {altered}")
    assert found.documents == ()
    assert not found.is_known
    assert scene.find(text_of("other")).documents == ()
    assert scene.find(text).is_known
    assert not scene.find(f"{text} {text_of('question', 8)}").is_known


def test_documents_with_the_same_interior_differ_by_their_first_and_last_words() -> None:
    scene = Scene()
    body = text_of("body", 40)
    for name in ("Anna", "Boris", "Clara"):
        scene.register(name, f"{name[0]}x {body}")
    for name in ("Dora", "Emil"):
        scene.register(name, f"{body} {name[0]}x")
    assert [d.doc_id for d in scene.find(f"Read.\n\nBx {body}\n\nWhat?").documents] == ["Boris"]
    assert [d.doc_id for d in scene.find(f"Read.\n\n{body} Ex\n\nWhat?").documents] == ["Emil"]


def test_more_documents_that_differ_at_their_edges_than_the_limit_are_not_registered() -> None:
    scene = Scene()
    body = text_of("body", 40)
    taken = [scene.register(f"d{i}", f"{i:03d} {body}") for i in range(MAX_SAME_CONTENT + 5)]
    assert taken.count(False) in range(1, 6)
    assert len(scene.tenant) == taken.count(True)


def test_the_longest_of_overlapping_documents_is_placed_and_the_groups_of_all_count() -> None:
    scene = Scene()
    inner, tail = text_of("inner", 20), text_of("tail", 20)
    scene.register("inner", inner, ["hr"])
    scene.register("outer", f"{inner} {tail}", ["legal"])
    found = scene.find(f"{inner} {tail}")
    assert [d.doc_id for d in found.documents] == ["outer"]
    assert found.acls == {("hr",), ("legal",)}


def test_one_text_of_several_ids_is_ambiguous_and_has_each_of_them_once() -> None:
    scene = Scene()
    text = text_of("one")
    scene.register("a", text)
    scene.register("b", text)
    scene.register("c", text, ["hr"], of_operator=True)
    found = scene.find(f"{text}\n\n{text}")
    assert [d.doc_id for d in found.documents] == ["a", "b"]
    assert all(d.is_ambiguous for d in found.documents)
    assert found.acls == {("hr",)}, "a text that one of its ids restricts is restricted"


def test_a_new_text_replaces_the_former_one_of_an_id() -> None:
    scene = Scene()
    old, new = text_of("old"), text_of("new")
    scene.register("one", old, ["hr"])
    scene.register("one", new)
    assert scene.find(old).documents == ()
    assert [d.doc_id for d in scene.find(new).documents] == ["one"]
    assert not scene.tenant.acls


def test_a_forgotten_document_is_not_found_and_others_are() -> None:
    scene = Scene()
    texts = {f"d{i}": text_of(f"d{i}") for i in range(200)}
    for name, text in texts.items():
        scene.register(name, text)
    for i in range(0, 200, 2):
        assert scene.tenant.forget(f"d{i}")
    assert not scene.tenant.forget("d0")
    for name, text in texts.items():
        assert [d.doc_id for d in scene.find(text).documents] == ([name] if int(name[1:]) % 2 else [])
    for name, text in texts.items():
        scene.register(name, text)
    assert all(scene.find(text).documents[0].doc_id == name for name, text in texts.items())


def test_random_operations_keep_what_a_dictionary_of_texts_would_find() -> None:
    rng = random.Random(7)
    scene = Scene(knows_bytes=False)
    pool = [text_of(f"p{i}", rng.randint(4, 30)) for i in range(60)]
    known: dict[str, str] = {}
    for _ in range(600):
        doc_id, text = f"d{rng.randint(0, 40)}", rng.choice(pool)
        if rng.random() < 0.3:
            assert scene.tenant.forget(doc_id) == (doc_id in known)
            known.pop(doc_id, None)
        elif scene.register(doc_id, text):
            known[doc_id] = text
        shown = rng.choice(pool)
        found = {d.doc_id for d in scene.find(f"\n\n{shown}\n\n").documents}
        holders = {doc_id for doc_id, text in known.items() if text == shown}
        assert found <= holders
        assert bool(found) == bool(holders)
    assert len(scene.tenant) == len(known)


def test_texts_of_few_tokens_are_not_registered() -> None:
    scene = Scene()
    assert not scene.register("short", "w1 w2")
    assert not scene.register("empty", "")
    assert len(scene.tenant) == 0


def test_a_prompt_of_any_length_is_looked_up() -> None:
    scene = Scene()
    text = text_of("one")
    scene.register("one", text)
    assert scene.find("").documents == ()
    long = " ".join([text_of("filler", 9000), text])
    assert [d.doc_id for d in scene.find(long).documents] == ["one"]


@pytest.mark.parametrize(
    ("kind", "tokens", "expected"),
    [
        ("byte_level", ["Ġa", "Ã", None], [b" a", b"\xc3", b""]),
        ("sentencepiece", ["▁a", "<0x0A>", "<s>"], [b" a", b"\n", b"<s>"]),
        ("wordpiece", ["a", "##b"], [b"a", b"b"]),
    ],
)
def test_the_bytes_of_tokens_are_those_of_their_texts(kind: str, tokens: list[str], expected: list[bytes]) -> None:
    assert bytes_of_tokens(tokens, kind) == expected  # type: ignore[arg-type]


def test_a_points_outside_of_the_field_are_refused() -> None:
    with pytest.raises(ValueError, match="points"):
        PolynomialHash((1, 2**33))


def test_documents_of_repeated_tokens_neither_hold_up_a_prompt_nor_lose_its_rights() -> None:
    scene = Scene()
    num_registered = sum(scene.register(f"r{n}", "--" * n, ["hr"]) for n in range(20, 300))
    assert 0 < num_registered <= 2 * MAX_SAME_CONTENT, "each of them is looked up at every token of such a prompt"
    found = scene.find("--" * 5000)
    assert not found.is_known
    assert found.acls == {("hr",)}
    found = scene.find("Read: " + "--" * 25 + " and no more of it.")
    assert found.documents
    assert found.acls == {("hr",)}
