"""Files of published question sets, read as they are published."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

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
DROP: dict[str, dict[str, Any]] = {
    "history_1": {
        "passage": "Zorval was founded in 1810 by Anna Krenvi and Bors Tamli with 12 people.",
        "qa_pairs": [
            {
                "query_id": "f37e81fa",
                "question": "How many people founded Zorval?",
                "answer": {"number": "2", "date": {"day": "", "month": "", "year": ""}, "spans": []},
                "validated_answers": [{"number": "", "date": {}, "spans": ["two"]}],
            },
            {
                "query_id": "f37e81fb",
                "question": "Who founded Zorval?",
                "answer": {"number": "", "date": {}, "spans": ["Anna Krenvi", "Bors Tamli"]},
            },
            {
                "query_id": "f37e81fc",
                "question": "When was Zorval founded?",
                "answer": {"number": "", "date": {"day": "", "month": "May", "year": "1810"}, "spans": []},
            },
            {"query_id": "f37e81fd", "question": "Why?", "answer": {"number": "", "date": {}, "spans": []}},
        ],
        "wiki_url": "https://en.wikipedia.org/wiki/Zorval",
    },
    "history_2": {"passage": "It makes clocks.", "qa_pairs": []},
}
CNN_DAILYMAIL = {
    "article": "(CNN) -- Zorval, which makes clocks, was sold on Monday.\nIts founder left.",
    "highlights": "Zorval is sold .\nIts founder leaves .",
    "id": "42c027e4ff9730fbb3de84c1af0d2c506e41c3e4",
}
XSUM = {"document": "Zorval was sold.", "summary": "A maker of clocks has a new owner.", "id": "35232142"}
FILES: dict[QuestionFormat, str] = {
    "squad": json.dumps(SQUAD),
    "hotpotqa": json.dumps(HOTPOTQA),
    "2wikimultihopqa": json.dumps(TWOWIKI, indent=1),
    "musique": "\n".join(json.dumps(each) for each in (MUSIQUE, {**MUSIQUE, "answerable": False})),
    "longbench": json.dumps(LONGBENCH) + "\n",
    "drop": json.dumps({**DROP, "history_1": {**DROP["history_1"], "qa_pairs": DROP["history_1"]["qa_pairs"][:1]}}),
    "cnn_dailymail": json.dumps(CNN_DAILYMAIL),
    "xsum": json.dumps([XSUM]),
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


def test_drop_has_answers_of_each_type_and_neighbouring_passages(tmp_path: Path) -> None:
    number, spans, date = read(tmp_path, json.dumps(DROP))
    assert [(each.kind, each.answers) for each in (number, spans, date)] == [
        ("number", ("2", "two")),
        ("spans", ("Anna Krenvi, Bors Tamli",)),
        ("date", ("May 1810",)),
    ]
    assert texts(number) == [passage["passage"] for passage in DROP.values()]


def test_a_summary_is_asked_for_by_the_beginning_of_its_article_among_its_neighbours(tmp_path: Path) -> None:
    rows = [{**XSUM, "document": f"Article {number} is about clocks that are sold in Tolmar."} for number in range(7)]
    questions = read(tmp_path, "\n".join(map(json.dumps, rows)))
    assert questions[3].text == 'Summarise the document that begins with "Article 3 is about clocks that are sold".'
    assert questions[3].answers == (XSUM["summary"],)
    for question, row in zip(questions, rows, strict=True):
        assert row["document"] in texts(question)
        assert len(question.documents) == 5
    assert texts(questions[0]) != texts(questions[1])


def test_a_csv_file_has_the_same_rows_as_json(tmp_path: Path) -> None:
    rows = [CNN_DAILYMAIL, {**CNN_DAILYMAIL, "article": 'He said "no",\u2028then left.'}]
    path = tmp_path / "test.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["id", "article", "highlights"])
        writer.writeheader()
        writer.writerows(rows)
    assert read_questions(path) == read(tmp_path, json.dumps(rows))


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
        ("drop", json.dumps({"history_1": {"passage": "It."}}), "passage history_1: qa_pairs: Field required: DROP"),
        ("drop", json.dumps({"history_2": DROP["history_2"]}), "are 1 records of drop without an answer"),
        ("xsum", json.dumps(CNN_DAILYMAIL), "line 1: document: Field required: XSUM has rows"),
        ("cnn_dailymail", "article,highlights\nIt is sold.\n", "line 2: highlights: Input should be a valid string"),
        ("cnn_dailymail", 'article,highlights\n"It is sold.\n', "is no CSV file .*: CNN/DailyMail has rows"),
    ],
)
def test_what_is_none_is_refused_with_its_place_and_what_was_expected(
    name: QuestionFormat, text: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"questions.json.*{message}"):
        read(tmp_path, text, name)
