"""Questions in a file: one a line, as text, or in a JSON object that says when each was asked."""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path

from ragcache_core.errors import TraceError
from ragcache_core.sim.traces.log_formats import question_of

_APART_S = 10.0
"""Between questions whose file says no times: far enough that none waits for another."""


def read_questions(path: Path | str) -> list[tuple[float, str]]:
    """Return when each question of a log was asked, in seconds from the first on, and what it was.

    A line that begins with ``{`` is a JSON object whose ``question`` (``query``, ``input``, ``prompt``) it is, and
    which may have a time; one without a question is passed over. Where one has no time, all are taken to be far apart.

    Raises:
        TraceError: the file cannot be read, is no UTF-8, or holds no question.
    """
    path = Path(path)
    found: list[tuple[float | None, str]] = []
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                found += _questions_of(line, path, number)
    except (OSError, EOFError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise TraceError(f"the questions cannot be read ({reason})", path) from error
    if not found:
        raise TraceError('it holds no question: write one a line, or objects as {"question": "Where is Zor?"}', path)
    times = [time_s for time_s, _ in found if time_s is not None]
    if len(times) < len(found):
        return [(i * _APART_S, question) for i, (_, question) in enumerate(found)]
    start_s = min(times)
    return sorted((time_s - start_s, question) for (_, question), time_s in zip(found, times, strict=True))


def _questions_of(line: bytes, path: Path, number: int) -> list[tuple[float | None, str]]:
    try:
        text = line.decode("utf-8-sig").strip()
        asked = question_of(json.loads(text) if text.startswith("{") else {"question": text})
    except UnicodeDecodeError as error:
        raise TraceError(f"not UTF-8 (byte {error.start + 1}): write questions as UTF-8", path, number) from error
    except json.JSONDecodeError as error:
        raise TraceError(f"not JSON ({error}): write a text, or an object with one", path, number) from error
    except (ValueError, RecursionError) as error:
        raise TraceError(str(error), path, number) from error
    return [] if asked is None else [asked]
