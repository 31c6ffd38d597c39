"""What a line of a published trace says: Mooncake's, Qwen-Bailian's, RAGPulse's, Azure's, BurstGPT's.

None has text. Hashes of blocks say which prompts have a common prefix: each full block is a document of a path, and
what fills none is the question. RAGPulse has passages. Azure's and BurstGPT's have arrivals and lengths alone: nothing
comes again in them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal

from ragcache_core.sim.traces.log_formats import Retrieval, seconds_of

PublishedFormat = Literal["mooncake", "qwen", "ragpulse", "azure", "burst"]
Row = Mapping[str, Any]

MOONCAKE_BLOCK: Final = 512
QWEN_BLOCK: Final = 16
_TABLES: Final[Mapping[str, PublishedFormat]] = {"ContextTokens": "azure", "Request tokens": "burst"}
_RAGPULSE_LENGTHS: Final = {"2_passages.jsonl": "passage_id", "5_web_search.jsonl": "web_search_id"}


def published_format_of(row: Row) -> PublishedFormat | None:
    """Return which published trace a line is from, or None if it does not tell."""
    if isinstance(hashes := row.get("hash_ids"), Mapping) and "passages_ids" in hashes:
        return "ragpulse"
    if hashes is not None:
        return "qwen" if "parent_chat_id" in row else "mooncake"
    return next((name for column, name in _TABLES.items() if column in row), None)


def is_table(first_line: bytes) -> bool:
    """Return whether a file's first line is the head of a published trace of comma-separated values."""
    return not first_line.startswith(b"{") and any(column.encode() in first_line for column in _TABLES)


def lengths_beside(trace: Path) -> dict[str, int]:
    """Return the tokens of RAGPulse's passages and web pages, by their ids, from the files beside its trace.

    Raises:
        ValueError: a line of them is broken. OSError: one cannot be read.
    """
    lengths = {}
    for name, id_column in _RAGPULSE_LENGTHS.items():
        for number, line in enumerate((trace.parent / name).read_bytes().splitlines(), 1):
            if line and not line.isspace():
                try:
                    row = json.loads(line)
                    lengths[str(_whole(row, id_column))] = _whole(row, "token_length", least=1)
                except (ValueError, TypeError, AttributeError) as error:
                    raise ValueError(f"line {number} of {name}: {error}") from error
    return lengths


def _mooncake(row: Row) -> Iterator[Retrieval]:
    """kvcache-ai/Mooncake, FAST 2025: milliseconds, blocks of 512 tokens."""
    yield _of_blocks(row, MOONCAKE_BLOCK, _whole(row, "timestamp") / 1000.0)


def _qwen(row: Row) -> Iterator[Retrieval]:
    """alibaba-edu/qwen-bailian-usagetraces-anon, USENIX ATC 2025: seconds, blocks of 16 tokens."""
    yield _of_blocks(row, QWEN_BLOCK, seconds_of(row.get("timestamp")))


def _of_blocks(row: Row, block_size: int, time_s: float) -> Retrieval:
    hashes, num_tokens = row.get("hash_ids"), _whole(row, "input_length")
    if not isinstance(hashes, list) or not all(isinstance(block, int) for block in hashes):
        raise ValueError(f"'hash_ids' is {hashes!r:.60}: it must be a list of whole numbers")
    num_full = num_tokens // block_size
    if len(hashes) not in (num_full, -(-num_tokens // block_size)):
        raise ValueError(
            f"'hash_ids' has {len(hashes)} blocks of {block_size} tokens for an 'input_length' of {num_tokens}: it "
            f"must have {-(-num_tokens // block_size)}"
        )
    blocks = tuple(map(str, hashes[:num_full]))
    return Retrieval(
        time_s, blocks, (block_size,) * num_full, num_tokens - num_full * block_size, _whole(row, "output_length")
    )


def _ragpulse(row: Row) -> Iterator[Retrieval]:
    """flashserve/RAGPulse, 2025: seconds, passages and pages of the web by their ids; lengths are in other files."""
    hashes = row.get("hash_ids")
    found = [hashes.get(name) for name in ("passages_ids", "web_search")] if isinstance(hashes, Mapping) else [None]
    doc_ids: list[str] = []
    for part in found:
        if not isinstance(part, list) or not all(isinstance(one, int) for one in part):
            raise ValueError(f"'hash_ids' is {hashes!r:.60}: it must have lists of ids, passages_ids and web_search")
        doc_ids += map(str, part)
    yield Retrieval(
        seconds_of(row.get("timestamp")), tuple(doc_ids), (None,) * len(doc_ids),
        output_tokens=_whole(row, "output_length"), prompt_tokens=_whole(row, "input_length"),
    )  # fmt: skip


def _azure(row: Row) -> Iterator[Retrieval]:
    """Azure/AzurePublicDataset, LLM inference 2023 and 2024: a date, tokens of prompt and answer."""
    yield _of_lengths(row, "TIMESTAMP", "ContextTokens", "GeneratedTokens")


def _burst(row: Row) -> Iterator[Retrieval]:
    """HPMLL/BurstGPT: seconds, tokens of prompt and answer; one that failed has an answer of none."""
    yield _of_lengths(row, "Timestamp", "Request tokens", "Response tokens")


def _of_lengths(row: Row, time: str, prompt: str, answer: str) -> Retrieval:
    return Retrieval(seconds_of(row.get(time)), (), (), _whole(row, prompt), _whole(row, answer))


PUBLISHED_READERS: Mapping[PublishedFormat, Callable[[Row], Iterator[Retrieval]]] = {
    "mooncake": _mooncake,
    "qwen": _qwen,
    "ragpulse": _ragpulse,
    "azure": _azure,
    "burst": _burst,
}


def _whole(row: Row, name: str, least: int = 0) -> int:
    value = row.get(name)
    if isinstance(value, str) and value.strip().isascii() and value.strip().isdigit():
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and value >= least:
        return value
    raise ValueError(f"{name!r} is {value!r:.60}: it must be a whole number, {least} or more")
