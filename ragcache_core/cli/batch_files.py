"""Files of ``ragcache batch``: requests, one per line, and answers in the format of OpenAI's batch output.

Each answer is on disk before the next one is written. Its record is named by a digest of the request, so that a second
start continues the file and never takes the answer to another request for its own.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Self

from ragcache_core.errors import ConfigError, quoted
from ragcache_core.private_files import make_folders, open_private, replacing
from ragcache_core.wire import check_sendable

CHAT_URL = "/v1/chat/completions"
_ID = "batch_req_"
_BEGIN = b'{"id": "' + _ID.encode()
"""How each record begins, and so the end of a file that was cut off."""


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A request of the input: a question, or a chat in the OpenAI protocol."""

    number: int
    custom_id: str
    question: str | None = None
    body: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BrokenLine:
    """An invalid line of the input, with the reason."""

    number: int
    custom_id: str | None
    reason: str

    def record(self) -> dict[str, Any]:
        """Return its record in the output."""
        message = f"line {self.number}: {self.reason}"
        return to_record(self.custom_id, digest_of(self.number, message), error={"code": "invalid", "message": message})


def to_record(
    custom_id: str | None,
    digest: str,
    response: Mapping[str, Any] | None = None,
    error: Mapping[str, Any] | None = None,
    **more: object,
) -> dict[str, Any]:
    """Return a line of the output in OpenAI's batch format, with the fields ``more``."""
    return {"id": f"{_ID}{digest}", "custom_id": custom_id, "response": response, "error": error, **more}


def digest_of(*parts: object) -> str:
    """Return a digest of a request's JSON data."""
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def read_batch(path: Path) -> tuple[list[BatchLine], list[BrokenLine]]:
    """Return the valid requests of a file, and its invalid lines.

    Raises:
        ConfigError: the file cannot be read, or has no line that is a request.
    """
    requests: dict[str, BatchLine] = {}
    broken = []
    try:
        for number, line in enumerate(path.read_bytes().splitlines(), start=1):
            if not line.strip():
                continue
            read = _read_line(line, number)
            if isinstance(read, BatchLine) and read.custom_id in requests:
                first = requests[read.custom_id].number
                read = BrokenLine(number, None, f"id {quoted(read.custom_id)} is that of line {first}: give it another")
            if isinstance(read, BatchLine):
                requests[read.custom_id] = read
            else:
                broken.append(read)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): name a file of questions") from error
    if not requests:
        reason = f": line {broken[0].number}: {broken[0].reason}" if broken else ": it is empty"
        raise ConfigError(f"{path} holds no request{reason}")
    return list(requests.values()), broken


def _read_line(line: bytes, number: int) -> BatchLine | BrokenLine:
    """Return the request of a line, or the reason why it is invalid."""
    custom_id: str | None = None
    try:
        record = json.loads(line.decode("utf-8-sig"))
        if not isinstance(record, dict):
            raise ConfigError("no JSON object")
        given = record.get("custom_id", record.get("id", f"line-{number}"))
        if not isinstance(given, str | int) or isinstance(given, bool):
            raise ConfigError(f"the id is {quoted(given)}: give a text")
        check_sendable(given, "the id")
        custom_id = str(given)
        match record:
            case {"question": str(question)} if question.strip():
                check_sendable(question, "the question")
                return BatchLine(number, custom_id, question)
            case {"question": question}:
                raise ConfigError(f"the question is {quoted(question)}: give a text that is not empty")
            case {"body": {"messages": [*_]} as body}:
                _check_chat(record, body)
                return BatchLine(number, custom_id, body=body)
        raise ConfigError(
            f'neither a "question" nor a "body" with "messages", as OpenAI\'s batches for {CHAT_URL} have'
        )
    except UnicodeDecodeError as error:
        reason = f"not UTF-8 (byte 0x{line[error.start]:02x} at offset {error.start})"
    except (ValueError, RecursionError) as error:  # ConfigError is a ValueError
        reason = str(error) if isinstance(error, ConfigError) else f"no JSON ({error})"
    return BrokenLine(number, custom_id, reason)


def _check_chat(record: Mapping[str, Any], body: Mapping[str, Any]) -> None:
    if (method := record.get("method", "POST")) != "POST":
        raise ConfigError(f"method is {quoted(method)}: it must be POST")
    if (url := record.get("url", CHAT_URL)) != CHAT_URL:
        raise ConfigError(f"url is {quoted(url)}: it must be {CHAT_URL}")
    if not body["messages"] or not all(isinstance(message, Mapping) for message in body["messages"]):
        raise ConfigError(f"messages is {quoted(body['messages'])}: give a list of objects")
    if body.get("stream"):
        raise ConfigError("stream is set, but a batch has whole answers: leave it out")
    check_sendable(body, "the body")


class AnswerFile:
    """The output of a batch, which continues an earlier run. A context manager; one process writes at a time.

    Attributes:
        path: of the file.
        models: the names of the models that answered earlier, by the ids of the requests.
    """

    def __init__(self, path: Path, file: IO[bytes], models: Mapping[str, str]) -> None:
        self.path = path
        self.models = models
        self._file = file

    @classmethod
    def open(cls, path: Path, digests: Mapping[str, str]) -> Self:
        """Open the file for requests with these digests by id; earlier answers to them are kept.

        What an earlier run could not answer is left out, to be answered now, and so is a record that was cut off.

        Raises:
            ConfigError: it cannot be written, is written by another process, or is not the output of this batch.
                It is as it was then.
        """
        try:
            make_folders(path.parent)
            file = _open_locked(path)
            try:
                file.seek(0)
                content = file.read()
                kept, models = _kept(path, content, digests)
                if len(kept) < len(content):
                    with replacing(path) as new:
                        new.write(kept)
                    file.close()
                    file = _open_locked(path)
            except BaseException:
                file.close()
                raise
        except OSError as error:
            raise ConfigError(f"{path} cannot be written ({error.strerror}): name another --output") from error
        return cls(path, file, models)

    def append(self, record: Mapping[str, Any]) -> None:
        """Append a record durably.

        Raises:
            ConfigError: it cannot be written; the records before are kept.
        """
        try:
            self._file.write(json.dumps(record).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise ConfigError(
                f"{self.path} cannot be written ({error.strerror}), the answers before are kept: make space, and run "
                "it again to continue"
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        with suppress(OSError):  # of what could not be written before, which append has reported
            self._file.close()


def _open_locked(path: Path) -> IO[bytes]:
    if path.exists() and not path.is_file():
        raise ConfigError(
            f"{path} is not a regular file, so an interrupted run could not be continued: name another --output"
        )
    while True:
        file = open(path, "a+b", opener=open_private)  # noqa: SIM115  (the caller closes it)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(file, path):
                return file
        except BlockingIOError as error:
            file.close()
            raise ConfigError(f"{path} is written by another run: wait until it is done, or name another") from error
        except BaseException:
            file.close()
            raise
        file.close()  # another run has replaced the file since, and what is written to this one is lost


def _is_at(file: IO[bytes], path: Path) -> bool:
    """Return whether ``path`` is the open file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _kept(path: Path, content: bytes, digests: Mapping[str, str]) -> tuple[bytes, dict[str, str]]:
    """Return the answers in ``content``, and the models that gave them."""
    *lines, last = content.split(b"\n")
    if last.strip(b"\0") and not (last.startswith(_BEGIN) or _BEGIN.startswith(last)):  # zeros: a loss of power
        raise _foreign(path, len(lines) + 1)
    kept, models = [], {}
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        match record:
            case {"id": str(name), "custom_id": str() | None as custom_id, "response": response, "error": error} if (
                name.startswith(_ID)
            ):
                if error is not None or custom_id is None:
                    continue
            case _:
                raise _foreign(path, number)
        if digests.get(custom_id) != name.removeprefix(_ID):
            raise ConfigError(
                f"{path} holds the answer to another request as {quoted(custom_id)}, of another batch or of other "
                "settings or documents: name another --output, or delete it"
            )
        kept.append(line + b"\n")
        models[custom_id] = str(((response or {}).get("body") or {}).get("model"))
    return b"".join(kept), models


def _foreign(path: Path, number: int) -> ConfigError:
    return ConfigError(f"{path} is no output of a batch (line {number}), so it is left as it is: name another --output")


def reasons(broken: Iterable[BrokenLine], shown: int = 3) -> str:
    """Return the first reasons of invalid lines, on one line."""
    broken = list(broken)
    more = f"; and {len(broken) - shown} more" if len(broken) > shown else ""
    return "; ".join(f"line {each.number}: {each.reason}" for each in broken[:shown]) + more
