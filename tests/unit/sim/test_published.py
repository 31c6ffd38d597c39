"""Published traces become traces of ours: lines in the shape in which each was published, made by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ragcache_core.errors import TraceError
from ragcache_core.sim.traces.log_import import Assumptions, ImportedFormat, ImportedLog, import_log
from ragcache_core.sim.traces.trace import TracedRequest

SAMPLES: dict[ImportedFormat, list[str]] = {
    "mooncake": [
        '{"timestamp": 27000, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 48]}',
        '{"timestamp": 30500, "input_length": 1536, "output_length": 26, "hash_ids": [46, 47, 2353]}',
    ],
    "qwen": [
        '{"chat_id": 159, "parent_chat_id": -1, "timestamp": 61.25, "input_length": 40, "output_length": 132, '
        '"type": "text", "turn": 1, "hash_ids": [1089, 1090, 1091]}',
        '{"chat_id": 160, "parent_chat_id": 159, "timestamp": 64.75, "input_length": 48, "output_length": 9, '
        '"type": "text", "turn": 2, "hash_ids": [1089, 1090, 7]}',
    ],
    "ragpulse": [
        '{"timestamp": "82", "input_length": 900, "output_length": 192, "hash_ids": {"sys_prompt": [31, 32], '
        '"passages_ids": [5, 3], "history": [41], "web_search": [9], "user_input": [51]}, "session_id": "17-af"}',
        '{"timestamp": "85.5", "input_length": 700, "output_length": 86, "hash_ids": {"sys_prompt": [31, 33], '
        '"passages_ids": [], "history": [41], "web_search": [], "user_input": [52]}, "session_id": "17-jv"}',
    ],
    "azure": [
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:15:46.6805900,374,44",
        "2023-11-16 18:15:50.1805900,396,109",
    ],
    "burst": [
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
        "5,ChatGPT,472,18,490,Conversation log",
        "8.5,GPT-4,1087,0,1087,API log",
    ],
}
TRACES: dict[ImportedFormat, list[TracedRequest]] = {
    "mooncake": [
        TracedRequest(0.0, ("46", "47"), (512, 512), 76, 52),
        TracedRequest(3.5, ("46", "47", "2353"), (512, 512, 512), 0, 26),
    ],
    "qwen": [
        TracedRequest(0.0, ("1089", "1090"), (16, 16), 8, 132),
        TracedRequest(3.5, ("1089", "1090", "7"), (16, 16, 16), 0, 9),
    ],
    "ragpulse": [
        TracedRequest(0.0, ("5", "3", "9"), (292, 298, 100), 210, 192),
        TracedRequest(3.5, (), (), 700, 86),
    ],
    "azure": [TracedRequest(0.0, (), (), 374, 44), TracedRequest(3.5, (), (), 396, 109)],
    "burst": [TracedRequest(0.0, (), (), 472, 18), TracedRequest(3.5, (), (), 1087, 1)],
}


def imported(folder: Path, lines: list[str], log_format: ImportedFormat | None = None) -> ImportedLog:
    (folder / "2_passages.jsonl").write_text(
        '{"passage_id": 5, "token_length": 292}\n{"passage_id": 3, "token_length": 298}\n\n'
    )
    (folder / "5_web_search.jsonl").write_text('{"web_search_id": 9, "token_length": 100}\n')
    path = folder / "log"
    path.write_text("\n".join(lines) + "\n")
    return import_log(path, Assumptions(), log_format)


@pytest.mark.parametrize("name", SAMPLES)
def test_a_published_trace_names_its_source_and_is_read(tmp_path: Path, name: ImportedFormat) -> None:
    log = imported(tmp_path, SAMPLES[name])
    assert log.log_format == name
    assert list(log.trace) == TRACES[name]
    assert (log.num_passed_over, log.num_estimated) == (0, 0)


BROKEN: dict[str, tuple[ImportedFormat, str, str]] = {
    "too few blocks": ("mooncake", '{"timestamp": 1, "input_length": 1100, "output_length": 2, "hash_ids": [1]}',
                       "has 1 blocks of 512 tokens for an 'input_length' of 1100: it must have 3"),
    "hashes of text": ("mooncake", '{"timestamp": 1, "input_length": 9, "output_length": 2, "hash_ids": ["a"]}',
                       "must be a list of whole numbers"),
    "no length": ("qwen", '{"timestamp": 1, "parent_chat_id": 3, "output_length": 2, "hash_ids": []}',
                  "'input_length' is None"),
    "a time that is none": ("qwen", '{"timestamp": "x", "input_length": 9, "output_length": 2, "hash_ids": [1]}',
                            "the time is 'x'"),
    "no passages": ("ragpulse", '{"timestamp": "1", "input_length": 9, "output_length": 2, "hash_ids": {}}',
                    "passages_ids and web_search"),
    "longer passages than the prompt": ("ragpulse", SAMPLES["ragpulse"][0].replace("900", "600"),
                                        "its documents have 690 tokens, its whole prompt 600"),
    "a passage of unknown length": ("ragpulse", SAMPLES["ragpulse"][0].replace("[5, 3]", "[5, 4]"),
                                    "the length of document '4' is unknown"),
    "a value too few": ("azure", "2023-11-16 18:15:46,374", "2 values for 3 columns"),
    "a negative length": ("azure", "2023-11-16 18:15:46,-3,4", "'ContextTokens' is '-3'"),
    "a word for a number": ("burst", "5,ChatGPT,many,18,490,API log", "'Request tokens' is 'many'"),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_line_of_a_published_trace_is_named(tmp_path: Path, what: str) -> None:
    name, line, message = BROKEN[what]
    with pytest.raises(TraceError, match=r"log:3: ") as refused:
        imported(tmp_path, [*SAMPLES[name][:2], line], name)
    assert message in str(refused.value)


def test_lengths_beside_a_trace_of_ragpulse_that_are_broken_or_missing_are_named(tmp_path: Path) -> None:
    imported(tmp_path, SAMPLES["ragpulse"])
    (tmp_path / "2_passages.jsonl").write_text('{"passage_id": 5}\n')
    with pytest.raises(TraceError, match=r"line 1 of 2_passages.jsonl: 'token_length' is None"):
        import_log(tmp_path / "log", Assumptions())
    (tmp_path / "2_passages.jsonl").unlink()
    with pytest.raises(TraceError, match="log:1: the length of document '5' is unknown.*--mean-tokens"):
        import_log(tmp_path / "log", Assumptions())
    assert len(import_log(tmp_path / "log", Assumptions(mean_tokens=100)).trace) == 2


def test_a_plain_log_with_a_table_in_it_is_no_table(tmp_path: Path) -> None:
    row = json.dumps({"t": 1, "docs": ["a"], "doc_tokens": [3], "question": "what are ContextTokens?"})
    assert imported(tmp_path, [row]).log_format == "plain"
