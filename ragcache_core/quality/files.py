"""Read questions from a file: RAGCache's JSON lines, or a published data set."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from ragcache_core.errors import ConfigError
from ragcache_core.quality.published import (
    FORMATS,
    PASSAGES,
    Aliases,
    AliasesOfEntity,
    Published,
    SquadRow,
    articles,
    format_of,
    is_row,
    neighbours,
)
from ragcache_core.quality.questions import EXAMPLE, Question, questions_of, share
from ragcache_core.types import QuestionFormat

_Model = TypeVar("_Model", bound=BaseModel)
_ALIASES_FILE = "id_aliases.json"


def read_questions(
    path: Path,
    corpus: Path | None = None,
    *,
    limit: int | None = None,
    question_format: QuestionFormat = "auto",
) -> list[Question]:
    """Return the questions of a file in order.

    ``question_format`` is found out by the first record unless it is given. ``corpus`` is for our own format: see
    :func:`questions_of`. Of more than ``limit`` questions, those of each kind that come first are taken, as many of one
    kind as of another.

    Raises:
        ConfigError: the file cannot be read, has no question with an answer, or has a line or a record that is none;
            with its number and what was expected.
    """
    text = _text(path)
    found = format_of(_first(text)) or "ragcache" if question_format == "auto" else question_format
    if found == "ragcache":
        questions = questions_of(text, path, corpus)
    elif corpus is not None:
        raise ConfigError(f"the questions {path} hold their documents, as {found} does: leave the corpus out")
    else:
        questions = list(_published(text, path, found))
    if not questions and found != "ragcache" and (num_records := sum(1 for _ in _records(text))):
        raise ConfigError(
            f"the questions {path} are {num_records} records of {found} without an answer, and at least one is needed: "
            "give a part with answers, as what is for training or validation is"
        )
    if not questions:
        raise ConfigError(f"the questions {path} are empty, or none has an answer: one question a line, as {EXAMPLE}")
    return questions if limit is None else share(questions, limit)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        cure = f"give a file of lines such as {EXAMPLE}"
        raise ConfigError(f"the questions {path} cannot be read ({reason}): {cure}") from error


def _first(text: str) -> object:
    """Return a file's first record; ``None`` if it has none."""
    try:
        _, record = next(_records(text), ("", None))
    except ValueError:
        record = None
    return record


def _published(text: str, path: Path, name: QuestionFormat) -> Iterator[Question]:
    if name in PASSAGES:
        passages = (record for _, record in _parsed(text, path, PASSAGES[name], PASSAGES[name].expected))
        yield from neighbours(passages).questions({})
        return
    model = FORMATS[name]
    aliases_path = path.with_name(_ALIASES_FILE)
    aliases = _aliases(aliases_path) if name == "2wikimultihopqa" and aliases_path.exists() else {}
    records: Iterable[tuple[str, Published]] = _parsed(text, path, model, model.expected)
    if name == "squad" and is_row(_first(text)):
        rows = (row for _, row in _parsed(text, path, SquadRow, SquadRow.expected))
        records = ((str(path), article) for article in articles(rows))
    for place, record in records:
        try:
            yield from record.questions(aliases)
        except ValueError as error:
            raise ConfigError(f"{place}: {error}: {model.expected}") from error


def _aliases(path: Path) -> Aliases:
    entities = _parsed(_text(path), path, AliasesOfEntity, AliasesOfEntity.expected)
    return {entity.Q_id: entity.aliases + entity.demonyms for _, entity in entities}


def _parsed(text: str, path: Path, model: type[_Model], expected: str) -> Iterator[tuple[str, _Model]]:
    try:
        for place, record in _records(text):
            place = f"{path}, {place}"
            yield place, model.model_validate(record)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = "".join(f"{part}: " for part in (place, ".".join(map(str, first["loc"]))) if part)
        raise ConfigError(f"{where}{first['msg']}: {expected}") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}, line {error.lineno}: no JSON ({error.msg}): {expected}") from error
    except csv.Error as error:
        raise ConfigError(f"{path} is no CSV file ({error}): {expected}") from error


def _records(text: str) -> Iterator[tuple[str, object]]:
    """Yield (place, record) of CSV rows, of JSON lines, of a JSON list, of SQuAD's ``data``, or of DROP's passages.

    Raises:
        json.JSONDecodeError: with the line of the file.
        csv.Error: a field is too long, or a quoted one does not end.
    """
    head = text.lstrip().partition("\n")[0]
    if "," in head and head[0] not in "{[":
        rows = csv.DictReader(io.StringIO(text, newline=""), strict=True)
        yield from ((f"line {rows.line_num}", row) for row in rows)
        return
    lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if len(lines) > 1 and _is_json(lines[0][1]):
        for number, line in lines:
            try:
                yield f"line {number}", json.loads(line)
            except json.JSONDecodeError as error:
                error.lineno += number - 1
                raise
    elif lines:
        whole = json.loads(text)
        records = whole.get("data", whole) if isinstance(whole, dict) else whole
        if isinstance(records, dict) and all(isinstance(each, dict) and "passage" in each for each in records.values()):
            yield from ((f"passage {name}", record) for name, record in records.items())
        elif isinstance(records, list):
            yield from ((f"record {number}", record) for number, record in enumerate(records, start=1))
        else:
            yield f"line {lines[0][0]}", records


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except json.JSONDecodeError:
        return False
    return True
