"""The documents name what is there: files, settings, options, series."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import fields
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from ragcache_core.cli import cli
from ragcache_core.client.pipeline.run import PipelineEvent
from ragcache_core.config import CacheConfig
from ragcache_core.ordering import DOCUMENT_ORDERS
from ragcache_core.stats import ChunkStats, EngineStats, PipelineReport, TierStats, series_of

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
ARCHITECTURE = (DOCS / "dev" / "architecture.md").read_text(encoding="utf-8")
HOW_IT_WORKS = (DOCS / "concepts" / "caching.md").read_text(encoding="utf-8")
OVERLAP = (DOCS / "concepts" / "overlap.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *DOCS.rglob("*.md")]
PICTURES = sorted((DOCS / "pictures").glob("*.svg"))
MAX_PICTURE_BYTES = 20_000


def test_the_architecture_shows_every_folder_and_no_other() -> None:
    there = {
        path.name for root in ("ragcache_core", "ragcache_integrations", "tests") for path in _packages(ROOT / root)
    }
    drawn = set(re.findall(r"(?<![\w/])(\w+)/(?= |$)", ARCHITECTURE.split("## Floors")[0], re.MULTILINE))
    drawn |= set(re.findall(r"(\w+)/", re.search(r"\n  bench/.*", ARCHITECTURE)[0]))  # type: ignore[index]
    assert there - drawn == set()


def test_every_path_that_the_architecture_names_is_there() -> None:
    roots = [ROOT, ROOT / "ragcache_core", ROOT / "ragcache_integrations", ROOT / "ragcache_core" / "retrieval"]
    named = re.findall(r"`((?:\w+/)+\w*(?:\.py)?)`", ARCHITECTURE.split("## Floors")[1])
    assert len(named) > 40
    assert [name for name in named if not any((root / name).exists() for root in roots)] == []


def test_no_page_waits_for_a_figure() -> None:
    assert {m for page in PAGES for m in re.findall(r"@[a-z_-]+@", page.read_text(encoding="utf-8"))} == set()


def test_every_file_that_a_page_names_is_there() -> None:
    folders = ("ragcache_core", "ragcache_integrations", "kernels", "docs", "examples", "tests", "benchmarks")
    there = {path.name for folder in folders for path in _sources(folder)} | {path.name for path in ROOT.glob("*.py")}
    for page in PAGES:
        named = set(re.findall(r"[a-z_]+\.py\b", page.read_text(encoding="utf-8")))
        assert named - there == set(), page.name


def test_every_link_within_the_project_leads_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert target.startswith("http") or (page.parent / target).exists(), (page.name, target)


def test_every_table_row_belongs_to_a_table_and_has_its_columns() -> None:
    wrong = list[tuple[str, str]]()
    for page in [*PAGES, *(ROOT / "examples").rglob("*.md")]:
        text = re.sub(r"(?ms)^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"))
        for table in re.findall(r"(?m)(?:^ *\|.*\n?)+", text):
            head, *rows = table.splitlines()
            if not rows or not re.fullmatch(r" *(?:\| *:?-+:? *)+\|", rows[0]):
                wrong.append((page.name, head))
            wrong += [(page.name, row) for row in rows if _num_cells(row) != _num_cells(head)]
    assert wrong == []


def test_every_setting_of_the_cache_is_explained_with_its_option() -> None:
    options = {param.name: param.opts[0] for param in cli.commands["serve"].params}
    for field in CacheConfig.model_fields:
        assert f"| `{field}` | `{options[field]}` |" in HOW_IT_WORKS


def test_every_series_of_ours_is_listed() -> None:
    series = {shown.name for stats in (EngineStats, TierStats, ChunkStats) for shown in series_of(stats).values()}
    assert len(series) > 30
    named = {name.removesuffix("_total") for name in re.findall(r"`(ragcache_\w+)`", HOW_IT_WORKS)}
    assert series - named == set()


def test_every_figure_of_a_search_is_explained() -> None:
    for name in (*(field.name for field in fields(PipelineReport)), "hidden_search_s"):
        assert f"`{name}`" in OVERLAP, name


def test_every_event_of_a_search_is_explained() -> None:
    for kind in get_args(get_type_hints(PipelineEvent)["kind"]):
        assert kind == "stage" or f"`{kind}`" in OVERLAP, kind


def test_every_order_of_documents_is_measured() -> None:
    for order in DOCUMENT_ORDERS:
        assert re.search(rf"^\| `{order}` \|", OVERLAP, re.MULTILINE), order


@pytest.mark.parametrize("picture", PICTURES, ids=lambda p: p.stem)
def test_a_picture_is_small_and_reads_on_any_background(picture: Path) -> None:
    drawing = ET.fromstring(picture.read_bytes())
    width, height = (float(drawing.attrib[side]) for side in ("width", "height"))
    ground = drawing.find("{http://www.w3.org/2000/svg}rect")
    assert ground is not None
    assert ground.attrib["fill"] == "#ffffff"
    assert (float(ground.attrib["width"]), float(ground.attrib["height"])) == (width - 1, height - 1)
    assert drawing.findall(".//{http://www.w3.org/2000/svg}text")
    assert picture.stat().st_size < MAX_PICTURE_BYTES
    assert any(f"pictures/{picture.name}" in page.read_text(encoding="utf-8") for page in PAGES)


def _num_cells(row: str) -> int:
    return len(re.findall(r"(?<!\\)\|", row.strip()))


def _sources(folder: str) -> list[Path]:
    return list((ROOT / folder).rglob("*.py"))


def _packages(folder: Path) -> list[Path]:
    """Return the folders of Python files below ``folder``, but those of unit tests, which have the product's names."""
    folders = {path.parent for path in folder.rglob("*.py")} - {folder}
    return [path for path in folders if not {"unit", "contracts", "engine", "benchmarks"} & set(path.parts[:-1])]
