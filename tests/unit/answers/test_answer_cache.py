"""Answers are found for near questions about the same versions, and for nothing else; on disk, and by many at once."""

from __future__ import annotations

import stat
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ragcache_core import Document, DocumentStore
from ragcache_core.answers import AnswerCache, AskedPrompt
from ragcache_core.answers.asked import content_hash
from ragcache_core.answers.cache import FoundAnswer
from ragcache_core.errors import ConfigError, StoreCorruptError, StoreError, StoreLockedError
from ragcache_core.retrieval import PrecomputedEmbedder


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


def asked(question: str | None = "what at 0", *documents: tuple[str, str], key: str = "k") -> AskedPrompt:
    return AskedPrompt(f"{key} {documents}", question, tuple((i, content_hash(text)) for i, text in documents))


def found(answers: AnswerCache, prompt: AskedPrompt) -> FoundAnswer:
    answer = answers.find(prompt)
    assert answer is not None
    return answer


def test_a_near_question_gets_the_answer_and_a_farther_one_does_not() -> None:
    answers = AnswerCache(Angles())
    assert answers.find(asked()) is None
    answers.keep(asked(), "east")
    same, near = found(answers, asked()), found(answers, asked("what then at 23"))
    assert (same.answer, same.question, same.similarity) == ("east", "what at 0", 1.0)
    assert near.answer == "east"
    assert near.similarity == pytest.approx(np.cos(np.radians(23)))
    assert answers.find(asked("what at 24")) is None  # its cosine is 0.913
    assert answers.find(asked("what then at 23", key="another")) is None


def test_the_nearest_of_several_wins_and_a_threshold_of_one_takes_equal_questions_alone() -> None:
    answers = AnswerCache(Angles(), threshold=0.9)
    for angle in (0, 20, 40):
        answers.keep(asked(f"what at {angle}"), str(angle))
    assert found(answers, asked("what at 27")).answer == "20"
    strict = AnswerCache(Angles(), threshold=1)
    strict.keep(asked(), "east")
    assert strict.find(asked("what at 1")) is None
    assert strict.find(asked()) is not None


def test_without_an_embedder_questions_are_compared_by_their_words() -> None:
    answers = AnswerCache()
    answers.keep(asked("Which moon of Saturn has seas of methane?"), "Titan")
    assert found(answers, asked("which moon of Saturn has the seas of methane")).answer == "Titan"
    assert answers.find(asked("Which moon of Saturn has seas of ethane?")) is None
    assert answers.find(asked("???")) is None


def test_a_prompt_without_a_question_is_answered_to_itself_alone() -> None:
    answers = AnswerCache(Angles())
    answers.keep(asked(None), "east")
    assert found(answers, asked(None)).question is None
    assert answers.find(asked(None, key="another")) is None


def test_a_second_answer_to_the_same_question_takes_the_place_of_the_first() -> None:
    answers = AnswerCache(Angles())
    answers.keep(asked(), "east")
    answers.keep(asked(), "West")
    assert len(answers) == 1
    assert found(answers, asked()).answer == "West"


def test_the_answer_that_was_longest_not_asked_for_goes_first() -> None:
    answers = AnswerCache(Angles(), max_answers=2)
    answers.keep(asked("what at 0"), "0")
    answers.keep(asked("what at 90"), "90")
    answers.find(asked("what at 0"))
    answers.keep(asked("what at 180"), "180")
    assert answers.find(asked("what at 90")) is None
    assert len(answers) == 2


def test_forgetting_a_document_drops_what_stands_on_it_and_nothing_else() -> None:
    answers = AnswerCache(Angles())
    answers.keep(asked("what at 0", ("zor", "Zor."), ("mel", "Mel.")), "both")
    answers.keep(asked("what at 90", ("mel", "Mel.")), "mel")
    assert answers.forget(["zor", "never stored"]) == 1
    assert answers.find(asked("what at 0", ("zor", "Zor."), ("mel", "Mel."))) is None
    assert answers.find(asked("what at 90", ("mel", "Mel."))) is not None
    assert answers.forget("mel") == 1
    assert len(answers) == 0


def test_an_answer_that_is_being_given_while_its_document_is_forgotten_is_not_kept() -> None:
    answers = AnswerCache(Angles())
    since = answers.now()
    answers.forget(["zor"])
    answers.keep(asked("what at 0", ("zor", "Zor.")), "old", since=since)
    answers.keep(asked("what at 0", ("mel", "Mel.")), "mel", since=since)
    assert [answers.find(asked("what at 0", d)) is None for d in (("zor", "Zor."), ("mel", "Mel."))] == [True, False]
    answers.keep(asked("what at 0", ("zor", "Zor is new.")), "new")
    assert len(answers) == 2


def test_a_new_version_drops_what_was_said_of_the_former() -> None:
    answers = AnswerCache(Angles())
    answers.keep(asked("what at 0", ("zor", "Zor is a city.")), "a city", since=None)
    assert answers.find(asked("what at 0", ("zor", "Zor was a city."), key="new")) is None
    assert len(answers) == 0


def test_what_a_store_does_not_hold_as_it_was_is_dropped(tmp_path: Path) -> None:
    with DocumentStore.create(tmp_path, embedder=Angles()) as store:
        store.add([Document("zor", "Zor at 0"), Document("mel", "Mel at 90"), Document("tar", "Tar at 180")])
        answers = AnswerCache(Angles())
        for angle, (doc_id, text) in enumerate([("zor", "Zor at 0"), ("mel", "Mel at 90"), ("tar", "Tar at 180")]):
            answers.keep(asked(f"what at {angle * 90}", (doc_id, text)), doc_id)
        assert answers.forget_outdated(store) == 0
        store.put([Document("mel", "Mel was at 90")])
        store.delete(["tar"])
        assert answers.forget_outdated(store) == 2
        assert answers.find(asked("what at 0", ("zor", "Zor at 0"))) is not None


def test_answers_outlive_the_process_for_their_owner_alone(tmp_path: Path) -> None:
    with AnswerCache(Angles(), folder=tmp_path / "answers") as answers:
        answers.keep(asked("what at 0", ("zor", "Zor.")), "the old secret")
        answers.keep(asked("what at 90", ("mel", "Mel.")), "north")
        assert answers.forget(["zor"]) == 1
        with pytest.raises(StoreLockedError, match="close that one, or choose another folder"):
            AnswerCache(Angles(), folder=tmp_path / "answers")
    files = list((tmp_path / "answers").iterdir())
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert not any(word in path.read_bytes() for path in files for word in (b"secret", b"zor", b"at 0"))
    with AnswerCache(Angles(), folder=tmp_path / "answers") as answers:
        assert found(answers, asked("what is at 91", ("mel", "Mel."))).answer == "north"
        answers.keep(asked("what at 180"), "west")
        assert len(answers) == 2


def test_another_embedder_compares_the_questions_that_were_kept_anew(tmp_path: Path) -> None:
    with AnswerCache(Angles(), folder=tmp_path) as answers:
        answers.keep(asked("what at 0"), "east")
        answers.keep(asked(None, key="whole"), "whole")

    class Turned(Angles):
        def embed_query(self, text: str) -> Any:
            return np.float32([0, 1]) if "this question" in text else super().embed_query(f"{text}0")

    with AnswerCache(Turned(), folder=tmp_path) as answers:
        assert answers.find(asked("what is at 9")) is None  # 90 degrees now
        assert found(answers, asked("what is at 1")).answer == "east"
        assert found(answers, asked(None, key="whole")).answer == "whole"


@pytest.mark.parametrize(
    "content", [b"no database at all, and longer than a header", b"SQLite format 3\0" + b"\xff" * 500]
)
def test_a_damaged_file_names_its_cure(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "answers.sqlite").write_bytes(content)
    with pytest.raises(StoreCorruptError, match="delete it, answers are given anew"):
        AnswerCache(Angles(), folder=tmp_path)
    (tmp_path / "answers.sqlite").unlink()
    AnswerCache(Angles(), folder=tmp_path).close()


def test_a_folder_that_cannot_be_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="choose another folder"):
        AnswerCache(Angles(), folder=tmp_path / "file" / "answers")


def test_a_disk_that_fails_costs_the_file_and_no_answer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    answers = AnswerCache(Angles(), folder=tmp_path)
    answers.close()
    for angle in (0, 90):
        answers.keep(asked(f"what at {angle}"), "here")
    assert answers.find(asked("what at 90")) is not None
    assert len(caplog.messages) == 1


def test_a_question_that_cannot_be_embedded_is_a_miss(caplog: pytest.LogCaptureFixture) -> None:
    angles = Angles()
    answers = AnswerCache(angles)
    answers.keep(asked(), "east")
    angles.is_broken = True
    assert answers.find(asked("what is at 1")) is None
    assert "the embedder is gone" in caplog.text
    answers.keep(asked("what is at 2"), "still kept for itself")
    assert found(answers, asked("what is at 2")).answer == "still kept for itself"
    assert answers.find(asked("nothing to compare by")) is None


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"threshold": 0}, "threshold is 0"),
        ({"threshold": 1.1}, "threshold is 1.1"),
        ({"threshold": float("nan")}, "threshold is nan"),
        ({"max_answers": 0}, "max_answers is 0"),
        ({"embedder": PrecomputedEmbedder()}, "embeds no question"),
        ({"embedder": "minilm"}, "str is not an embedding model"),
    ],
)
def test_what_cannot_work_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        AnswerCache(**{"embedder": Angles(), **settings})


def test_many_threads_may_find_keep_and_forget_at_once(tmp_path: Path) -> None:
    with AnswerCache(Angles(), max_answers=20, folder=tmp_path) as answers:

        def use(i: int) -> None:
            about = asked(f"what at {i % 40 * 9}", (f"d{i % 5}", "text"))
            found = answers.find(about)
            assert found is None or found.answer == f"d{i % 5}"
            answers.keep(about, f"d{i % 5}")
            if i % 10 == 0:
                answers.forget([f"d{i % 5}"])

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(use, range(200)))
        assert len(answers) <= 20
        kept = len(answers)
    with AnswerCache(Angles(), folder=tmp_path) as answers:
        assert len(answers) == kept
