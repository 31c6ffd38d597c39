"""How the documents of a store were split: ``chunking.json`` in its folder, so that the next reading does it so."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from ragcache_core.errors import ConfigError, StoreCorruptError
from ragcache_core.private_files import open_private

_FILE_NAME = "chunking.json"
_FORMAT = 1
_LEAST_TOKENS = 32
"""One character may be a dozen tokens, and none is cut in two."""


@dataclass(frozen=True, slots=True)
class Chunking:
    """Lengths of chunks, in characters or in tokens of a tokenizer.

    ``tokenizer`` is a folder or a name of the hub, and ``tokenizer_sha256`` what it was when the texts were split.

    Raises:
        ConfigError: fewer tokens than a single character may have.
    """

    max_length: int = 1600
    min_length: int | None = None
    overlap: int = 0
    tokenizer: str | None = None
    tokenizer_sha256: str | None = None

    def __post_init__(self) -> None:
        if self.tokenizer is not None and self.max_length < _LEAST_TOKENS:
            raise ConfigError(
                f"chunks of {self.max_length} tokens cannot be cut, a character may have more: give {_LEAST_TOKENS} or "
                "more"
            )

    @property
    def unit(self) -> str:
        """What lengths are counted in."""
        return "characters" if self.tokenizer is None else "tokens"


def read_chunking(store: Path) -> Chunking | None:
    """Return how the documents of the store at ``store`` were split, if that was noted.

    Raises:
        StoreCorruptError: the file that says so is damaged.
    """
    path = store / _FILE_NAME
    try:
        content = json.loads(path.read_bytes())
        if content.pop("format") != _FORMAT:
            raise ValueError("another format")
        return Chunking(**content)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StoreCorruptError(
            f"{path}, which says how the documents were split, cannot be read ({error}): delete it, and give the "
            "lengths again that they were split with"
        ) from error


def write_chunking(store: Path, chunking: Chunking) -> None:
    """Save how documents were split; for whom the store is locked."""
    temporary = store / f"{_FILE_NAME}.new"
    with open(temporary, "w", encoding="ascii", opener=open_private) as file:
        json.dump({"format": _FORMAT, **asdict(chunking)}, file)
    temporary.replace(store / _FILE_NAME)
