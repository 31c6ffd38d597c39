"""Files of SQuAD, HotpotQA, MuSiQue, 2WikiMultihopQA and LongBench, read as they are published."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ragcache_core.errors import ConfigError
from ragcache_core.quality import Question, read_questions
from ragcache_core.types import QuestionFormat

SQUAD = {
    "version": "v2.0",
    "data": [
        {
            "title": "Zorval",
            "paragraphs": [
                {
                    "context": "Zorval was founded by Anna Krenvi in Tolmar.",
                    "qas": [
                        {
                            "id": "56be85543aeaaa14008c9063",
                            "question": "Who founded Zorval?",
                            "answers": [
                                {"text": "Anna Krenvi", "answer_start": 22},
                                {"text": "Krenvi", "answer_start": 27},
                                {"text": "Anna Krenvi", "answer_start": 22},
                            ],
                            "is_impossible": False,
                        },
                        {
                            "id": "5ad39d53604f3c001a3fe8d1",
                            "question": "Who sold Zorval?",
                            "answers": [],
                            "plausible_answers": [{"text": "Anna Krenvi", "answer_start": 22}],
                            "is_impossible": True,
                        },
                    ],
                },
                {"context": "It makes clocks.", "qas": []},
            ],
        }
    ],
}
SQUAD_ROW = {
    "id": "56be85543aeaaa14008c9063",
    "title": "Zorval",
    "context": "Zorval was founded by Anna Krenvi in Tolmar.",
    "question": "Who founded Zorval?",
    "answers": {"text": ["Anna Krenvi"], "answer_start": [22]},
}
HOTPOTQA = [
    {
        "_id": "5a8b57f25542995d1e6f1371",
        "answer": "Tolmar",
        "question": "Where was the founder of Zorval born?",
        "supporting_facts": [["Zorval", 0], ["Anna Krenvi", 1]],
        "context": [
            ["Zorval", ["Zorval was founded by Anna Krenvi.", " It makes clocks."]],
            ["Anna Krenvi", ["Anna Krenvi is a person.", " She was born in Tolmar."]],
            ["Nothing", []],
        ],
        "type": "bridge",
        "level": "hard",
    }
]
TWOWIKI = [
    {
        "_id": "8813f87c0bdd11eba7f7acde48001122",
        "type": "compositional",
        "question": "Where was the founder of Zorval born?",
        "context": [["Zorval", ["Zorval was founded by Anna Krenvi."]], ["Anna Krenvi", ["She was born in Tolmar."]]],
        "entity_ids": "Q1_Q2",
        "supporting_facts": [["Zorval", 0], ["Anna Krenvi", 0]],
        "evidences": [["Zorval", "founder", "Anna Krenvi"], ["Anna Krenvi", "place of birth", "Tolmar"]],
        "answer": "Tolmar",
        "evidences_id": [["Q1", "founder", "Q2"], ["Q2", "place of birth", "Q3"]],
        "answer_id": "Q3",
    }
]
MUSIQUE = {
    "id": "3hop1__482757_12019_460946",
    "paragraphs": [
        {"idx": 0, "title": "Zorval", "paragraph_text": "Zorval was founded by Anna Krenvi.", "is_supporting": True},
        {"idx": 1, "title": "Anna Krenvi", "paragraph_text": "She was born in Tolmar.", "is_supporting": True},
    ],
    "question": "Where was the founder of Zorval born?",
    "question_decomposition": [{"id": 1, "question": "Zorval >> founder", "answer": "Anna Krenvi"}],
    "answer": "Tolmar",
    "answer_aliases": ["Tolmar City"],
    "answerable": True,
}
LONGBENCH = {
    "input": "Where was the founder of Zorval born?",
    "context": "Passage 1:\nZorval\nZorval was founded by Anna Krenvi.\n\n"
    "Passage 2:\nAnna Krenvi\nShe was born in Tolmar.\n",
    "answers": ["Tolmar"],
    "length": 17,
    "dataset": "hotpotqa",
    "language": "en",
    "all_classes": None,
    "_id": "b9d3b6a9",
}
FILES: dict[QuestionFormat, str] = {
    "squad": json.dumps(SQUAD),
    "hotpotqa": json.dumps(HOTPOTQA),
    "2wikimultihopqa": json.dumps(TWOWIKI, indent=1),
    "musique": "\n".join(json.dumps(each) for each in (MUSIQUE, {**MUSIQUE, "answerable": False})),
    "longbench": json.dumps(LONGBENCH) + "\n",
}


def read(folder: Path, text: str, question_format: QuestionFormat = "auto", limit: int | None = None) -> list[Question]:
    path = folder / "questions.json"
    path.write_text(text, encoding="utf-8")
    return read_questions(path, limit=limit, question_format=question_format)


def texts(question: Question) -> list[str]:
    return [document.text for document in question.documents]


@pytest.mark.parametrize("name", list(FILES))
def test_the_format_is_found_out_by_the_first_record(name: QuestionFormat, tmp_path: Path) -> None:
    found, named = read(tmp_path, FILES[name]), read(tmp_path, FILES[name], name)
    assert found == named
    assert len(found) == 1


def test_squad_shows_a_paragraph_among_its_neighbours_and_leaves_out_what_is_impossible(tmp_path: Path) -> None:
    (question,) = read(tmp_path, FILES["squad"])
    assert (question.text, question.answers) == ("Who founded Zorval?", ("Anna Krenvi", "Krenvi"))
    assert texts(question) == ["Zorval\nZorval was founded by Anna Krenvi in Tolmar.", "Zorval\nIt makes clocks."]


def test_hotpotqa_has_titles_joined_sentences_and_types(tmp_path: Path) -> None:
    (question,) = read(tmp_path, FILES["hotpotqa"])
    assert (question.answers, question.kind) == (("Tolmar",), "bridge")
    assert texts(question) == [
        "Zorval\nZorval was founded by Anna Krenvi. It makes clocks.",
        "Anna Krenvi\nAnna Krenvi is a person. She was born in Tolmar.",
    ]


def test_2wikimultihopqa_takes_aliases_from_the_file_beside_it(tmp_path: Path) -> None:
    (alone,) = read(tmp_path, FILES["2wikimultihopqa"])
    assert (alone.answers, alone.kind) == (("Tolmar",), "compositional")
    lines = [{"Q_id": "Q3", "aliases": ["Tolmar City"], "demonyms": ["Tolmarer"]}, {"Q_id": "Q4", "aliases": ["Mel"]}]
    (tmp_path / "id_aliases.json").write_text("\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    (question,) = read(tmp_path, FILES["2wikimultihopqa"])
    assert question.answers == ("Tolmar", "Tolmar City", "Tolmarer")
    (tmp_path / "id_aliases.json").write_text('{"Q_id": "Q3"}\n', encoding="utf-8")
    with pytest.raises(
        ConfigError, match=r"id_aliases.json, line 1: aliases: Field required: id_aliases.json has lines"
    ):
        read(tmp_path, FILES["2wikimultihopqa"])


def test_musique_has_aliases_and_hops_and_only_what_is_answerable(tmp_path: Path) -> None:
    (question,) = read(tmp_path, FILES["musique"])
    assert (question.answers, question.kind) == (("Tolmar", "Tolmar City"), "3hop")
    assert texts(question)[1] == "Anna Krenvi\nShe was born in Tolmar."


def test_passages_of_longbench_are_documents_and_any_other_context_is_one(tmp_path: Path) -> None:
    several, one = read(tmp_path, FILES["longbench"] + json.dumps({**LONGBENCH, "context": "Zorval. " * 9}))
    assert (several.kind, several.answers) == ("hotpotqa", ("Tolmar",))
    assert texts(several) == ["Zorval\nZorval was founded by Anna Krenvi.", "Anna Krenvi\nShe was born in Tolmar."]
    assert len(one.documents) == 1


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("squad", json.dumps(HOTPOTQA), "record 1: paragraphs: Field required: SQuAD has"),
        ("squad", '{\n"data": [\n{]}', "line 3: no JSON"),
        ("hotpotqa", json.dumps([*HOTPOTQA, {"question": "Who?"}]), "record 2: answer: Field required: HotpotQA"),
        (
            "hotpotqa",
            json.dumps([{**HOTPOTQA[0], "context": [["T", "no list"]]}]),
            "record 1: context.0.1: Input should",
        ),
        ("hotpotqa", json.dumps([{**HOTPOTQA[0], "context": []}]), "record 1: the question 'Where .*' has no document"),
        ("2wikimultihopqa", json.dumps([{**TWOWIKI[0], "answer": ""}]), "record 1: answer: '' is blank: give it text"),
        ("musique", FILES["musique"] + "\n{", "line 3: no JSON"),
        (
            "musique",
            json.dumps({**MUSIQUE, "paragraphs": 3}),
            "line 1: paragraphs: Input should be a valid list: MuSiQue",
        ),
        (
            "musique",
            json.dumps({**MUSIQUE, "answerable": False}),
            "are 1 records of musique without an answer, and at le",
        ),
        (
            "squad",
            json.dumps({**SQUAD_ROW, "context": " "}),
            "line 1: context: ' ' is blank: give it text, .*: SQuAD on",
        ),
        ("squad", json.dumps({**SQUAD_ROW, "answers": {"text": []}}), "are 1 records of squad without an answer"),
        (
            "squad",
            json.dumps({**SQUAD_ROW, "answers": ["x"]}),
            "line 1: answers: Input should be .*: SQuAD on the hub has",
        ),
        ("longbench", json.dumps({**LONGBENCH, "answers": []}), "line 1: answers: List should have at least 1 item"),
        ("longbench", "[1]", "record 1: Input should be a valid dictionary or .*: LongBench has lines"),
        ("longbench", "", "are empty, or none has an answer"),
    ],
)
def test_what_is_none_is_refused_with_its_place_and_what_was_expected(
    name: QuestionFormat, text: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"questions.json.*{message}"):
        read(tmp_path, text, name)
