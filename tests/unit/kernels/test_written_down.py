"""docs/dev/kernels.md names every operation and every file of the kernels."""

from __future__ import annotations

import re
from pathlib import Path

from ragcache_kernels.check.__main__ import _parser

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "dev" / "kernels.md").read_text(encoding="utf-8")
SHELF = ROOT / "kernels" / "ragcache_kernels"


def test_every_operation_has_a_picture_and_a_twin() -> None:
    sources = {path: path.read_text(encoding="utf-8") for path in SHELF.glob("*.py")}
    operations = [name for text in sources.values() for name in re.findall(r"^def naive_(\w+)", text, re.MULTILINE)]
    assert len(operations) == 4
    for name in operations:
        assert any(f"\ndef {name}(" in text and "@triton.jit" in text for text in sources.values()), name
        section = PAGE.partition(f"## `{name}`")[2].partition("\n## ")[0]
        assert "```\n" in section, name


def test_every_file_of_the_shelf_is_named() -> None:
    section = PAGE.partition("## Files")[2].partition("\n## ")[0]
    named = set(re.findall(r"(\w+\.py)`", section))
    assert {path.name for path in SHELF.rglob("*.py")} - {"__init__.py"} == named


def test_every_option_of_the_check_is_explained() -> None:
    options = {option for action in _parser()._actions for option in action.option_strings if option.startswith("--")}
    assert {option for option in options if f"`{option}`" not in PAGE} <= {"--help", "--output", "--cost-model"}
    assert "--output" in PAGE
    assert "--cost-model" in PAGE
