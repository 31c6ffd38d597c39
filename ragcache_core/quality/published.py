"""Published question sets: a model and a reader for each format.

Titles become the first line of their documents. What has no answer (``is_impossible``, ``answerable: false``) is left
out: there is nothing to compare with.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from ragcache_core.quality.questions import ALL_KINDS, Question, text_document
from ragcache_core.types import QuestionFormat

NUM_SQUAD_DOCUMENTS = 5
"""A paragraph of SQuAD is shown among its neighbours, since one document alone has no company that could change."""
_NUM_FIRST_WORDS = 8
"""Words of an article by which a question names it."""
_PASSAGE = re.compile(r"^(?:Passage \d+:|文章\d+)\s*", re.MULTILINE)
_HOPS = re.compile(r"\dhop")

Aliases = Mapping[str, Sequence[str]]
"""Other names of an entity, by its Wikidata id."""


def _not_blank(text: str) -> str:
    if not text.strip():
        raise PydanticCustomError(
            "blank", "{text} is blank: give it text, or leave the record out", {"text": f"{text!r:.20}"}
        )
    return text


Text = Annotated[str, AfterValidator(_not_blank)]


class Published(BaseModel, ABC):
    """A record of a file; ``expected`` describes the format in errors."""

    model_config = ConfigDict(frozen=True)
    expected: ClassVar[str]

    @abstractmethod
    def questions(self, aliases: Aliases) -> Iterator[Question]:
        """Yield the answerable questions with their documents."""


class _SquadAnswer(BaseModel):
    text: Text


class _SquadQuestion(BaseModel):
    question: Text
    answers: list[_SquadAnswer]
    is_impossible: bool = False
    kind: str = ALL_KINDS


class _SquadParagraph(BaseModel):
    context: Text
    qas: list[_SquadQuestion]


class Squad(Published):
    """An article of SQuAD 1.1 or 2.0 (Rajpurkar et al., 2016, 2018)."""

    expected: ClassVar[str] = (
        'SQuAD has {"data": [articles]}, an article {"title", "paragraphs": [{"context", "qas": [{"question", '
        '"answers": [{"text"}]}]}]}'
    )
    title: str = ""
    paragraphs: list[_SquadParagraph]

    def questions(self, aliases: Aliases) -> Iterator[Question]:
        texts = [paragraph.context for paragraph in self.paragraphs]
        for place, paragraph in enumerate(self.paragraphs):
            for number, entry in enumerate(paragraph.qas):
                if entry.answers and not entry.is_impossible:
                    start = max(0, min(place - number % NUM_SQUAD_DOCUMENTS, len(texts) - NUM_SQUAD_DOCUMENTS))
                    shown = [(self.title, text) for text in texts[start : start + NUM_SQUAD_DOCUMENTS]]
                    yield _question(entry.question, [answer.text for answer in entry.answers], shown, entry.kind)


class _HubAnswers(BaseModel):
    text: list[str]


class SquadRow(BaseModel):
    """A question of SQuAD on the Hugging Face hub: a row names its paragraph and its article."""

    expected: ClassVar[str] = (
        'SQuAD on the hub has rows of {"title", "context", "question", "answers": {"text": [...]}}'
    )
    title: str = ""
    context: Text
    question: Text
    answers: _HubAnswers


def articles(rows: Iterable[SquadRow]) -> Iterator[Squad]:
    """Yield the articles of rows, with their paragraphs and questions in order."""
    found: dict[str, dict[str, list[_SquadQuestion]]] = {}
    for row in rows:
        answers = [_SquadAnswer(text=text) for text in row.answers.text if text.strip()]
        entry = found.setdefault(row.title, {}).setdefault(row.context, [])
        entry.append(_SquadQuestion(question=row.question, answers=answers))
    for title, paragraphs in found.items():
        shown = [_SquadParagraph(context=context, qas=entry) for context, entry in paragraphs.items()]
        yield Squad(title=title, paragraphs=shown)


class Passage(BaseModel, ABC):
    """A record with one document, which is shown among those of neighbouring records, as a paragraph of SQuAD is."""

    model_config = ConfigDict(frozen=True, coerce_numbers_to_str=True)
    expected: ClassVar[str]

    @abstractmethod
    def paragraph(self) -> _SquadParagraph:
        """Return the document with its questions."""


def neighbours(passages: Iterable[Passage]) -> Squad:
    """Return the passages of a file as one article."""
    return Squad(paragraphs=[passage.paragraph() for passage in passages])


class _DropDate(BaseModel):
    model_config = ConfigDict(coerce_numbers_to_str=True)
    day: str = ""
    month: str = ""
    year: str = ""


class _DropAnswer(BaseModel):
    model_config = ConfigDict(coerce_numbers_to_str=True)
    number: str = ""
    date: _DropDate = _DropDate()
    spans: list[str] = []

    @property
    def text(self) -> str:
        """The answer as text; several spans are separated by commas."""
        date = " ".join(part for part in (self.date.day, self.date.month, self.date.year) if part)
        return self.number or date or ", ".join(self.spans)

    @property
    def kind(self) -> str:
        """The type of the answer, by DROP's own names."""
        if self.number:
            return "number"
        return "spans" if len(self.spans) > 1 else "span" if self.spans else "date"


class _DropQuestion(BaseModel):
    question: Text
    answer: _DropAnswer
    validated_answers: list[_DropAnswer] = []


class Drop(Passage):
    """A passage of DROP (Dua et al., 2019)."""

    expected: ClassVar[str] = (
        'DROP has {passage id: {"passage", "qa_pairs": [{"question", "answer": {"number", "date": {"day", "month", '
        '"year"}, "spans": [...]}, "validated_answers": [...]}]}}'
    )
    passage: Text
    qa_pairs: list[_DropQuestion]

    def paragraph(self) -> _SquadParagraph:
        questions = []
        for pair in self.qa_pairs:
            texts = (answer.text for answer in (pair.answer, *pair.validated_answers))
            answers = [_SquadAnswer(text=text) for text in texts if text.strip()]
            questions.append(_SquadQuestion(question=pair.question, answers=answers, kind=pair.answer.kind))
        return _SquadParagraph(context=self.passage, qas=questions)


class CnnDailyMail(Passage):
    """An article of CNN/DailyMail (See et al., 2017) and the highlights that summarise it."""

    expected: ClassVar[str] = 'CNN/DailyMail has rows of {"article", "highlights", "id"}'
    article: Text
    highlights: Text

    def paragraph(self) -> _SquadParagraph:
        return _summarised(self.article, self.highlights)


class XSum(Passage):
    """An article of XSUM (Narayan et al., 2018) and the sentence that summarises it."""

    expected: ClassVar[str] = 'XSUM has rows of {"document", "summary", "id"}'
    document: Text
    summary: Text

    def paragraph(self) -> _SquadParagraph:
        return _summarised(self.document, self.summary)


def _summarised(article: str, summary: str) -> _SquadParagraph:
    """Return an article with the question for its summary, which names it by its first words."""
    beginning = " ".join(article.split()[:_NUM_FIRST_WORDS])
    question = f'Summarise the document that begins with "{beginning}".'
    answers = [_SquadAnswer(text=summary)]
    return _SquadParagraph(context=article, qas=[_SquadQuestion(question=question, answers=answers)])


def _pairs(context: Any) -> Any:
    """Return the hub's columns, {"title": [...], "sentences": [...]}, as the authors' pairs."""
    match context:
        case {"title": [*titles], "sentences": [*sentences]} if len(titles) == len(sentences):
            return list(zip(titles, sentences, strict=True))
    return context


class HotpotQA(Published):
    """A question of HotpotQA in the distractor setting (Yang et al., 2018)."""

    expected: ClassVar[str] = (
        'HotpotQA (distractor) has a list of {"question", "answer", "context": [[title, [sentence, ...]], ...]}'
    )
    question: Text
    answer: Text
    context: Annotated[list[tuple[str, list[str]]], BeforeValidator(_pairs)]
    type: str = ALL_KINDS

    def questions(self, aliases: Aliases) -> Iterator[Question]:
        shown = [(title, " ".join(sentence.strip() for sentence in sentences)) for title, sentences in self.context]
        yield _question(self.question, [self.answer, *self._other_answers(aliases)], shown, self.type)

    def _other_answers(self, aliases: Aliases) -> Sequence[str]:
        return ()


class TwoWikiMultihopQA(HotpotQA):
    """A question of 2WikiMultihopQA (Ho et al., 2020); its aliases are in ``id_aliases.json``, beside the questions."""

    expected: ClassVar[str] = (
        '2WikiMultihopQA has a list of {"question", "answer", "context": [[title, [sentence, ...]], ...]}'
    )
    answer_id: str | None = None

    def _other_answers(self, aliases: Aliases) -> Sequence[str]:
        return aliases.get(self.answer_id or "", ())


class _MusiqueParagraph(BaseModel):
    title: str
    paragraph_text: str


class Musique(Published):
    """A question of MuSiQue (Trivedi et al., 2022)."""

    expected: ClassVar[str] = (
        'MuSiQue has lines of {"id", "question", "answer", "answer_aliases", "paragraphs": [{"title", '
        '"paragraph_text"}], "answerable"}'
    )
    id: str = ""
    question: Text
    answer: str
    answer_aliases: list[str] = []
    paragraphs: list[_MusiqueParagraph]
    answerable: bool = True

    def questions(self, aliases: Aliases) -> Iterator[Question]:
        if self.answerable:
            hops = _HOPS.match(self.id)
            shown = [(paragraph.title, paragraph.paragraph_text) for paragraph in self.paragraphs]
            answers = [self.answer, *self.answer_aliases]
            yield _question(self.question, answers, shown, hops.group() if hops else ALL_KINDS)


class LongBench(Published):
    """A line of LongBench (Bai et al., 2024); a context of several passages becomes several documents."""

    expected: ClassVar[str] = 'LongBench has lines of {"input", "context", "answers": [...], "dataset"}'
    input: Text
    context: Text
    answers: list[str] = Field(min_length=1)
    dataset: str = ALL_KINDS

    def questions(self, aliases: Aliases) -> Iterator[Question]:
        shown = [("", passage) for passage in _PASSAGE.split(self.context)]
        yield _question(self.input, self.answers, shown, self.dataset)


class AliasesOfEntity(BaseModel):
    """A line of 2WikiMultihopQA's ``id_aliases.json``."""

    expected: ClassVar[str] = 'id_aliases.json has lines of {"Q_id", "aliases": [...], "demonyms": [...]}'
    Q_id: str
    aliases: list[str]
    demonyms: list[str] = []


FORMATS: dict[QuestionFormat, type[Published]] = {
    "squad": Squad,
    "hotpotqa": HotpotQA,
    "2wikimultihopqa": TwoWikiMultihopQA,
    "musique": Musique,
    "longbench": LongBench,
}


PASSAGES: dict[QuestionFormat, type[Passage]] = {"drop": Drop, "cnn_dailymail": CnnDailyMail, "xsum": XSum}


def is_row(record: object) -> bool:
    """Return whether a record of SQuAD is a row of the hub rather than an article."""
    return isinstance(record, dict) and isinstance(record.get("context"), str)


def format_of(record: object) -> QuestionFormat | None:
    """Return the published format of a file's first record; ``None`` if unknown."""
    match record:
        case {"documents": _}:
            return None
        case {"paragraphs": _, "question": _}:
            return "musique"
        case {"paragraphs": _}:
            return "squad"
        case {"question": _, "context": str(), "answers": {"text": _}}:
            return "squad"  # rows of the hub
        case {"passage": _, "qa_pairs": _}:
            return "drop"
        case {"article": _, "highlights": _}:
            return "cnn_dailymail"
        case {"document": _, "summary": _}:
            return "xsum"
        case {"input": _, "context": _}:
            return "longbench"
        case {"question": _, "context": _, "evidences": _}:
            return "2wikimultihopqa"
        case {"question": _, "context": _}:
            return "hotpotqa"
    return None


def _question(text: str, answers: Sequence[str], shown: Sequence[tuple[str, str]], kind: str = ALL_KINDS) -> Question:
    """Return a question with its distinct answers and documents.

    Raises:
        ValueError: all answers or documents are blank.
    """
    right = tuple(dict.fromkeys(answer for answer in answers if answer.strip()))
    documents = tuple(dict.fromkeys(_text(title, body) for title, body in shown if body.strip()))
    if not right or not documents:
        raise ValueError(f"the question {text!r:.80} has no {'document' if right else 'answer'} with text")
    return Question(text, right, tuple(map(text_document, documents)), kind)


def _text(title: str, body: str) -> str:
    return "\n".join(part.strip() for part in (title, body) if part.strip())
