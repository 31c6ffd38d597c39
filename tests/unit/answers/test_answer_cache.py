"""The answer cache finds answers by similar questions about the same versions of documents, also after a restart."""

from __future__ import annotations

import json
import resource
import sqlite3
import stat
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ragcache_core import Document, DocumentStore
from ragcache_core.answers import AnswerCache, FoundAnswer, QuestionKey
from ragcache_core.answers.cache import content_hash
from ragcache_core.errors import StoreCorruptError, StoreError, StoreLockedError, StoreVersionError


class Angles:
    """Embeds a question as the angle, in degrees, that is its last word; others as nothing."""

    name, dimension = "angles", 2
    is_broken = False

    def embed_query(self, text: str) -> Any:
        if self.is_broken:
            raise OSError("the embedder is gone")
        word = text.rsplit(" ", 1)[-1].rstrip("?")
        angle = np.radians(float(word)) if word.lstrip("-").replace(".", "").isdigit() else None
        return np.zeros(2, np.float32) if angle is None else np.float32([np.cos(angle), np.sin(angle)])

    def embed_documents(self, texts: Sequence[str]) -> Any:
        return np.stack([self.embed_query(text) for text in texts])


def prompt(question: str | None = "what at 0", *documents: tuple[str, str], key: str = "k") -> QuestionKey:
    return QuestionKey(f"{key} {documents}", question, tuple((i, content_hash(text)) for i, text in documents))


def found(answers: AnswerCache, key: QuestionKey) -> FoundAnswer:
    answer = answers.find(key)
    assert answer is not None
    return answer


def test_a_near_question_gets_the_answer_and_a_farther_one_does_not() -> None:
    answers = AnswerCache(Angles())
    assert answers.find(prompt()) is None
    answers.keep(prompt(), "east")
    same, near = found(answers, prompt()), found(answers, prompt("what then at 23"))
    assert (same.answer, same.question, same.similarity) == ("east", "what at 0", 1.0)
    assert near.answer == "east"
    assert near.similarity == pytest.approx(np.cos(np.radians(23)))
    assert answers.find(prompt("what at 24")) is None  # its cosine is 0.913
    assert answers.find(prompt("what then at 23", key="another")) is None


def test_the_nearest_of_several_wins_and_a_threshold_of_one_takes_equal_questions_alone() -> None:
    answers = AnswerCache(Angles(), threshold=0.9)
    for angle in (0, 20, 40):
        answers.keep(prompt(f"what at {angle}"), str(angle))
    assert found(answers, prompt("what at 27")).answer == "20"
    strict = AnswerCache(Angles(), threshold=1)
    strict.keep(prompt(), "east")
    assert strict.find(prompt("what at 1")) is None
    assert strict.find(prompt()) is not None


def test_a_prompt_without_a_question_is_answered_to_itself_alone() -> None:
    answers = AnswerCache(Angles())
    answers.keep(prompt(None), "east")
    assert found(answers, prompt(None)).question is None
    assert answers.find(prompt(None, key="another")) is None


def test_the_answer_that_was_longest_not_asked_for_goes_first() -> None:
    answers = AnswerCache(Angles(), max_answers=2)
    answers.keep(prompt("what at 0"), "0")
    answers.keep(prompt("what at 90"), "90")
    answers.find(prompt("what at 0"))
    answers.keep(prompt("what at 180"), "180")
    assert answers.find(prompt("what at 90")) is None
    assert len(answers) == 2


def test_forgetting_a_document_drops_what_stands_on_it_and_nothing_else() -> None:
    answers = AnswerCache(Angles())
    answers.keep(prompt("what at 0", ("zor", "Zor."), ("mel", "Mel.")), "both")
    answers.keep(prompt("what at 90", ("mel", "Mel.")), "mel")
    assert answers.forget(["zor", "never stored"]) == 1
    assert answers.find(prompt("what at 0", ("zor", "Zor."), ("mel", "Mel."))) is None
    assert answers.find(prompt("what at 90", ("mel", "Mel."))) is not None
    assert answers.forget("mel") == 1
    assert len(answers) == 0


def test_an_answer_that_is_being_given_while_its_document_is_forgotten_is_not_kept() -> None:
    answers = AnswerCache(Angles())
    since = answers.now()
    answers.forget(["zor"])
    answers.keep(prompt("what at 0", ("zor", "Zor.")), "old", since=since)
    answers.keep(prompt("what at 0", ("mel", "Mel.")), "mel", since=since)
    assert [answers.find(prompt("what at 0", d)) is None for d in (("zor", "Zor."), ("mel", "Mel."))] == [True, False]
    answers.keep(prompt("what at 0", ("zor", "Zor is new.")), "new")
    assert len(answers) == 2


def test_find_and_keep_read_only_the_answers_about_the_documents_of_the_question() -> None:
    class Counted(tuple[tuple[str, str], ...]):
        num_reads = 0

        def __iter__(self) -> Iterator[tuple[str, str]]:
            Counted.num_reads += 1
            return super().__iter__()

    answers = AnswerCache(Angles(), max_answers=30)
    for i in range(30):
        answers.keep(replace(prompt(key=str(i)), documents=Counted([(f"d{i}", "v")])), "a")
    for ask in (lambda key: answers.find(key), lambda key: answers.keep(key, "b")):
        Counted.num_reads = 0
        ask(prompt("what at 5", ("e", "text")))
        assert Counted.num_reads <= 1, "the one that is evicted"
    assert len(answers) == 30


def test_deleted_answers_are_those_of_a_search_through_all_answers() -> None:
    random = np.random.default_rng(3)
    answers, expected = AnswerCache(Angles(), max_answers=20), dict[QuestionKey, str]()
    for step in range(400):
        pairs = dict.fromkeys(f"d{i}" for i in random.integers(0, 8, 2))
        shown = tuple((doc_id, f"v{random.integers(0, 2)}") for doc_id in pairs)
        key = prompt(f"what at {random.integers(0, 2) * 90}", *shown)
        if step % 10 == 9:
            outdated = [k for k in expected if {i for i, _ in k.documents} & set(pairs)]
            assert answers.forget(pairs) == len(outdated)
        else:
            outdated = [k for k in expected if any(i in pairs and (i, v) not in key.documents for i, v in k.documents)]
        for each in outdated:
            del expected[each]
        if step % 10 != 9:
            expected.pop(key, None)
            answers.keep(key, f"answer {step}")
            expected[key] = f"answer {step}"
            if len(expected) > 20:
                del expected[next(iter(expected))]
            assert found(answers, key).answer == f"answer {step}"
        assert len(answers) == len(expected)


def test_what_a_store_does_not_hold_as_it_was_is_dropped(tmp_path: Path) -> None:
    with DocumentStore.create(tmp_path, embedder=Angles()) as store:
        store.add([Document("zor", "Zor at 0"), Document("mel", "Mel at 90"), Document("tar", "Tar at 180")])
        answers = AnswerCache(Angles())
        for angle, (doc_id, text) in enumerate([("zor", "Zor at 0"), ("mel", "Mel at 90"), ("tar", "Tar at 180")]):
            answers.keep(prompt(f"what at {angle * 90}", (doc_id, text)), doc_id)
        assert answers.forget_outdated(store) == 0
        store.put([Document("mel", "Mel was at 90")])
        store.delete(["tar"])
        assert answers.forget_outdated(store) == 2
        assert answers.find(prompt("what at 0", ("zor", "Zor at 0"))) is not None


def test_answers_outlive_the_process_for_their_owner_alone(tmp_path: Path) -> None:
    with AnswerCache(Angles(), folder=tmp_path / "answers") as answers:
        answers.keep(prompt("what at 0", ("zor", "Zor.")), "the old secret")
        answers.keep(prompt("what at 90", ("mel", "Mel.")), "north")
        assert answers.forget(["zor"]) == 1
        with pytest.raises(StoreLockedError, match="close that one, or choose another folder"):
            AnswerCache(Angles(), folder=tmp_path / "answers")
    files = list((tmp_path / "answers").iterdir())
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert not any(word in path.read_bytes() for path in files for word in (b"secret", b"zor", b"at 0"))
    with AnswerCache(Angles(), folder=tmp_path / "answers") as answers:
        assert found(answers, prompt("what is at 91", ("mel", "Mel."))).answer == "north"
        answers.keep(prompt("what at 180"), "west")
        assert len(answers) == 2


def test_another_embedder_embeds_the_stored_questions_again(tmp_path: Path) -> None:
    with AnswerCache(Angles(), folder=tmp_path) as answers:
        answers.keep(prompt("what at 0"), "east")
        answers.keep(prompt(None, key="whole"), "whole")

    class Turned(Angles):
        def embed_query(self, text: str) -> Any:
            return np.float32([0, 1]) if "this question" in text else super().embed_query(f"{text}0")

    with AnswerCache(Turned(), folder=tmp_path) as answers:
        assert answers.find(prompt("what is at 9")) is None  # 90 degrees now
        assert found(answers, prompt("what is at 1")).answer == "east"
        assert found(answers, prompt(None, key="whole")).answer == "whole"


@pytest.mark.parametrize(
    "content", [b"no database at all, and longer than a header", b"SQLite format 3\0" + b"\xff" * 500]
)
def test_a_file_that_is_no_database_is_refused_with_a_hint(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "answers.sqlite").write_bytes(content)
    with pytest.raises(StoreCorruptError, match="delete it"):
        AnswerCache(Angles(), folder=tmp_path)
    (tmp_path / "answers.sqlite").unlink()
    AnswerCache(Angles(), folder=tmp_path).close()


@contextmanager
def full_disk() -> Iterator[None]:
    """Fail every write beyond the first bytes of a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (256, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_answers_that_cannot_be_written_are_served_from_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with AnswerCache(Angles(), folder=tmp_path) as answers:
        with full_disk():
            for angle in (0, 90):
                answers.keep(prompt(f"what at {angle}"), "here")
        assert answers.find(prompt("what at 90")) is not None
        assert len(caplog.messages) == 1
        answers.keep(prompt("what at 180"), "west")
    with AnswerCache(Angles(), folder=tmp_path) as answers:
        assert [answers.find(prompt(f"what at {angle}")) is None for angle in (0, 90, 180)] == [True, True, False]


@pytest.mark.parametrize(
    "delete",
    [
        lambda answers, _: answers.forget(["zor"]),
        lambda answers, _: answers.clear(),
        lambda answers, store: answers.forget_outdated(store),
    ],
    ids=["forget", "clear", "forget_outdated"],
)
def test_a_deletion_is_on_disk_or_an_error(tmp_path: Path, delete: Callable[[AnswerCache, Any], object]) -> None:
    zor = prompt("what at 0", ("zor", "Zor."))
    store = DocumentStore.create(tmp_path / "store", embedder=Angles())
    with store, AnswerCache(Angles(), folder=tmp_path / "answers") as answers:
        answers.keep(zor, "the old secret")
        with full_disk(), pytest.raises(StoreError, match="still on disk"):
            delete(answers, store)
        assert answers.find(zor) is None
        delete(answers, store)
    assert not any(b"secret" in path.read_bytes() for path in (tmp_path / "answers").iterdir())
    with AnswerCache(Angles(), folder=tmp_path / "answers") as answers:
        assert (len(answers), answers.find(zor)) == (0, None)


def damage(folder: Path, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(folder / "answers.sqlite")) as db, db:
        db.execute(statement, values)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("vector", np.float32([1, np.nan]).tobytes()),
        ("vector", np.float32([0, 1]).tobytes()),
        ("vector", np.float32([1]).tobytes()),
        ("vector", b"odd"),
        ("vector", None),
        ("vector", "text"),
        ("answer", "east?"),
        ("answer", None),
        ("question", "what at 1"),
        ("documents", "[]"),
        ("documents", "no JSON"),
        ("key", "other"),
        ("checksum", None),
    ],
)
def test_a_damaged_row_is_a_miss_and_leaves_the_file(tmp_path: Path, column: str, value: object) -> None:
    zor = prompt("what at 0", ("zor", "Zor."))
    with AnswerCache(Angles(), folder=tmp_path) as answers:
        answers.keep(zor, "east")
        answers.keep(prompt("what at 90", ("mel", "Mel.")), "north")
    damage(tmp_path, f"UPDATE answers SET {column} = ? WHERE answer = 'east'", value)
    with AnswerCache(Angles(), folder=tmp_path) as answers:
        near = replace(zor, question="what is at 1")
        keys = (zor, near, replace(near, context_hash="other"), replace(near, question="what is at 89"))
        assert [answers.find(key) for key in keys] == [None] * 4
        assert found(answers, prompt("what is at 91", ("mel", "Mel."))).answer == "north"
        assert answers.forget(["zor"]) == 0
    assert b"east" not in (tmp_path / "answers.sqlite").read_bytes()


def test_a_flipped_bit_is_a_miss_or_a_refused_file(tmp_path: Path) -> None:
    path = tmp_path / "answers.sqlite"
    keys = {str(angle): prompt(f"what at {angle}", ("zor", f"Zor {angle}."), key="é") for angle in range(0, 300, 100)}
    keys = {answer: replace(key, documents=((answer, "version"),)) for answer, key in keys.items()}
    with AnswerCache(Angles(), folder=tmp_path) as answers:
        for answer, key in keys.items():
            answers.keep(key, answer)
    whole = path.read_bytes()
    used = [place for place, byte in enumerate(whole) if byte]
    num_found = 0
    for place in used[::7]:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        with suppress(StoreError), AnswerCache(Angles(), folder=tmp_path) as answers:
            every = {answer: answers.find(key) for answer, key in keys.items()}
            assert all(answer is None or answer.answer == right for right, answer in every.items())
            num_found += sum(answer is not None for answer in every.values())
    assert num_found > len(used) // 7, "most bits are of one answer, or of none"


def test_the_format_without_checksums_is_converted(tmp_path: Path) -> None:
    zor = prompt("what at 0", ("zor", "Zor."))
    rows = [
        (1, zor.context_hash, zor.question, "east", json.dumps(zor.documents), np.float32([np.nan, 0]).tobytes()),
        (2, "whole", None, "all of it", "[]", None),
        (3, "k", "what at 90", "damaged", "no JSON", None),
    ]
    with closing(sqlite3.connect(tmp_path / "answers.sqlite")) as db, db:
        db.execute(
            "CREATE TABLE answers (number INTEGER PRIMARY KEY, key TEXT NOT NULL, question TEXT, answer TEXT NOT NULL, "
            "documents TEXT NOT NULL, vector BLOB)"
        )
        db.execute("CREATE TABLE probe (vector BLOB NOT NULL)")
        db.executemany("INSERT INTO answers VALUES (?, ?, ?, ?, ?, ?)", rows)
        db.execute("INSERT INTO probe VALUES (?)", (np.float32([0, 0]).tobytes(),))
        db.execute("PRAGMA user_version = 1")
    for _ in range(2):
        with AnswerCache(Angles(), folder=tmp_path) as answers:
            assert found(answers, replace(zor, question="what is at 1")).answer == "east"
            assert found(answers, QuestionKey("whole", None, ())).answer == "all of it"
            assert len(answers) == 2
    with AnswerCache(Angles(), folder=tmp_path) as answers:
        assert answers.forget(["zor"]) == 1


def test_a_file_of_a_newer_format_is_refused_and_stays(tmp_path: Path) -> None:
    with AnswerCache(Angles(), folder=tmp_path) as answers:
        answers.keep(prompt(), "east")
    damage(tmp_path, "PRAGMA user_version = 3")
    before = (tmp_path / "answers.sqlite").read_bytes()
    with pytest.raises(StoreVersionError, match="format 3"):
        AnswerCache(Angles(), folder=tmp_path)
    assert (tmp_path / "answers.sqlite").read_bytes() == before


def test_many_threads_may_find_keep_and_forget_at_once(tmp_path: Path) -> None:
    with AnswerCache(Angles(), max_answers=20, folder=tmp_path) as answers:

        def use(i: int) -> None:
            about = prompt(f"what at {i % 40 * 9}", (f"d{i % 5}", "text"))
            found = answers.find(about)
            assert found is None or found.answer == f"d{i % 5}"
            answers.keep(about, f"d{i % 5}")
            if i % 10 == 0:
                answers.forget([f"d{i % 5}"])

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(use, range(80)))
        assert len(answers) <= 20
        kept = len(answers)
    with AnswerCache(Angles(), folder=tmp_path) as answers:
        assert len(answers) == kept


def test_a_new_version_drops_what_was_said_of_the_former() -> None:
    answers = AnswerCache(Angles())
    answers.keep(prompt("what at 0", ("zor", "Zor is a city.")), "a city", since=None)
    assert answers.find(prompt("what at 0", ("zor", "Zor was a city."), key="new")) is None
    assert len(answers) == 0
