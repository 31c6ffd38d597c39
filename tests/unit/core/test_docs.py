"""The documents name what is there: files, settings, options, metrics; and they are written in plain sentences."""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import yaml

from benchmarks.doc_plots import PLOTS
from ragcache_core.cli import cli
from ragcache_core.client.pipeline.run import PipelineEvent
from ragcache_core.config import CacheConfig
from ragcache_core.log import LOG_EVENTS
from ragcache_core.stats import PipelineReport
from tests.support.reference_pages import CLI_PAGE, cli_page

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(path for path in DOCS.rglob("*.md") if "results" not in path.parts)]
CARDS = [ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "examples").glob("*/README.md"))]
MAX_WORDS, MAX_MEAN_SENTENCE, LONG_SENTENCE, MAX_LONG_SHARE = 2_500, 18, 35, 0.03
CODE = re.compile(r"(?ms)^ *(```|~~~).*?^ *\1\s*$")


def _text(*path: str) -> str:
    return DOCS.joinpath(*path).read_text(encoding="utf-8")


def _name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def _sentences(page: Path) -> list[str]:
    """Return the sentences of a page's prose: without code, tables, headings and pictures."""
    text = re.sub(r"(?s)<!--.*?-->|<[a-z/][^>\n]*>", "", CODE.sub("\n\n", page.read_text(encoding="utf-8")))
    text = re.sub(r"(?m)^ *(\||#|!\[|\$ ).*$", "\n", text)
    text = re.sub(r"(?m)^ *([-*+]|\d+\.) +(\[ \] )?", "\n\n", text)
    sentences = list[str]()
    for block in re.split(r"\n\s*\n", text):
        plain = re.sub(r"!?\[((?:[^\[\]]|\[[^\]]*\])*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "x", block))
        plain = plain.replace("*", "")
        sentences += re.split(r"(?<=[.!?])[\"')]*\s+(?=[\"'(A-Z0-9x])", plain)
    return [sentence for sentence in sentences if _num_words(sentence)]


def _num_words(text: str) -> int:
    return sum(bool(re.search(r"\w", word)) for word in text.split())


def test_the_sentences_of_the_documentation_are_short() -> None:
    lengths = [_num_words(sentence) for page in [*PAGES, *CARDS] for sentence in _sentences(page)]
    assert len(lengths) > 2_000
    assert sum(lengths) / len(lengths) <= MAX_MEAN_SENTENCE
    assert sum(length > LONG_SENTENCE for length in lengths) / len(lengths) < MAX_LONG_SHARE


def test_no_page_for_users_is_too_long() -> None:
    words = {
        _name(page): _num_words(CODE.sub("", page.read_text(encoding="utf-8")))
        for page in PAGES
        if page.relative_to(ROOT).parts[1:2] not in (("reference",), ("dev",))
    }
    assert {page: number for page, number in words.items() if number > MAX_WORDS} == {}
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_every_page_has_a_place_in_the_navigation() -> None:
    text = re.sub(r"!!python/\S+|!ENV", "", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    nav = yaml.safe_load(text.split("\nnav:")[1].split("\nvalidation:")[0])
    named = {page for section in nav for page in _leaves(section)}
    pages = {page.relative_to(DOCS).as_posix() for page in PAGES[1:]}
    assert pages - named == set()


def test_every_guide_ends_with_a_check() -> None:
    for page in (DOCS / "guides").glob("*.md"):
        headings = re.findall(r"(?m)^## (.*)$", page.read_text(encoding="utf-8"))
        assert headings[-1] == "Check that it works", page.name


def test_the_page_about_the_command_line_is_current() -> None:
    assert CLI_PAGE.read_text(encoding="utf-8") == cli_page(), "run `make reference`"


@pytest.mark.parametrize("plot", PLOTS)
def test_a_plot_shows_the_committed_results(plot: str) -> None:
    drawn = (DOCS / "pictures" / f"{plot}.svg").read_text(encoding="utf-8")
    assert drawn == PLOTS[plot](), "run `python -m benchmarks.doc_plots`"


def test_every_route_of_the_server_is_listed() -> None:
    page = _text("reference", "http.md")
    routes = set[str]()
    for source in (ROOT / "ragcache_core" / "vllm_plugin" / "server").rglob("*routes.py"):
        tree = ast.parse(source.read_text(encoding="utf-8"))
        prefixes = {
            node.targets[0].id: next((str(k.value.value) for k in node.value.keywords if k.arg == "prefix"), "")  # type: ignore[attr-defined]
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and "APIRouter" in ast.dump(node.value)
        }
        for function in (node for node in tree.body if isinstance(node, ast.AsyncFunctionDef)):
            for call in (d for d in function.decorator_list if isinstance(d, ast.Call)):
                router, method, path = call.func.value.id, call.func.attr, call.args[0].value  # type: ignore[attr-defined]
                routes.add(f"`{method.upper()} {prefixes[router]}{path}")
    assert len(routes) > 15
    assert {route for route in routes if route not in page} == set()


def test_every_environment_variable_is_listed() -> None:
    page = _text("reference", "environment.md")
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "ragcache_core").rglob("*.py")]
    variables = {name for text in sources for name in re.findall(r'"(RAGCACHE_[A-Z_]+)"', text)}
    assert len(variables) > 5
    assert {name for name in variables if f"`{name}`" not in page} == set()


def test_every_alert_has_a_runbook() -> None:
    rules = (ROOT / "examples" / "monitoring" / "ragcache-rules.yml").read_text(encoding="utf-8")
    alerts = re.findall(r"- alert: (\w+)", rules)
    assert len(alerts) >= 8
    page = _text("operate", "troubleshooting.md")
    assert [alert for alert in alerts if f"\n### {alert}\n" not in page] == []


def test_every_log_code_is_under_a_symptom() -> None:
    page = _text("operate", "troubleshooting.md").partition("\n## By log code\n")[2].partition("\n## ")[0]
    codes = {code for events in LOG_EVENTS.values() for code in events}
    assert set(re.findall(r"`(RC-[A-Z-]+)`", page)) == codes


def test_the_architecture_shows_every_folder_and_no_other() -> None:
    there = {
        path.name for root in ("ragcache_core", "ragcache_integrations", "tests") for path in _packages(ROOT / root)
    }
    page = _text("dev", "architecture.md")
    drawn = set(re.findall(r"(?<![\w/])(\w+)/(?= |$)", page.split("## Layers")[0], re.MULTILINE))
    drawn |= set(re.findall(r"(\w+)/", re.search(r"\n  bench/.*", page)[0]))  # type: ignore[index]
    assert there - drawn == set()


def test_every_path_that_the_architecture_names_is_there() -> None:
    roots = [ROOT, ROOT / "ragcache_core", ROOT / "ragcache_integrations", ROOT / "ragcache_core" / "retrieval"]
    named = re.findall(r"`((?:\w+/)+\w*(?:\.py)?)`", _text("dev", "architecture.md").split("## Layers")[1])
    assert len(named) > 40
    assert [name for name in named if not any((root / name).exists() for root in roots)] == []


def test_every_file_that_a_page_names_is_there() -> None:
    folders = ("ragcache_core", "ragcache_integrations", "kernels", "docs", "examples", "tests", "benchmarks")
    there = {path.name for folder in folders for path in _sources(folder)} | {path.name for path in ROOT.glob("*.py")}
    for page in PAGES:
        named = set(re.findall(r"[a-z_]+\.py\b", page.read_text(encoding="utf-8")))
        assert named - there == set(), page.name


def test_every_link_within_the_project_leads_somewhere() -> None:
    for page in [*PAGES, *CARDS]:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert target.startswith("http") or (page.parent / target).exists(), (_name(page), target)


def test_every_table_row_belongs_to_a_table_and_has_its_columns() -> None:
    wrong = list[tuple[str, str]]()
    for page in [*PAGES, *(ROOT / "examples").rglob("*.md")]:
        text = CODE.sub("", page.read_text(encoding="utf-8"))
        for table in re.findall(r"(?m)(?:^ *\|.*\n?)+", text):
            head, *rows = table.splitlines()
            if not rows or not re.fullmatch(r" *(?:\| *:?-+:? *)+\|", rows[0]):
                wrong.append((page.name, head))
            wrong += [(page.name, row) for row in rows if _num_cells(row) != _num_cells(head)]
    assert wrong == []


def test_every_setting_of_the_cache_is_explained_with_its_option() -> None:
    options = {param.name: param.opts[0] for param in cli.commands["serve"].params}
    page = _text("reference", "configuration.md")
    for field in CacheConfig.model_fields:
        assert f"| `{field}` | `{options[field]}` |" in page


def test_every_metric_of_ours_is_listed() -> None:
    server = ROOT / "ragcache_core" / "vllm_plugin" / "server"
    sources = [ROOT / "ragcache_core" / "stats.py", *server.glob("metrics/*.py"), *server.rglob("metrics.py")]
    metrics = {
        name for source in sources for name in re.findall(r'"(ragcache_\w+)"', source.read_text(encoding="utf-8"))
    }
    assert len(metrics) > 40
    named = {name.removesuffix("_total") for name in re.findall(r"`(ragcache_\w+)`", _text("reference", "metrics.md"))}
    assert metrics - named == set()


def test_every_statistic_that_a_page_for_users_names_is_there() -> None:
    folders = ("ragcache_core", "ragcache_integrations", "examples")
    words = {
        word for folder in folders for path in _sources(folder) for word in re.findall(r"\w+", path.read_text("utf-8"))
    }
    for page in PAGES:
        if page.parent.name != "dev":
            named = set(re.findall(r"`(?:\w+\.)*((?:num|is|has|mean|sum)_\w+)`", page.read_text(encoding="utf-8")))
            assert named - words == set(), _name(page)


def _leaves(nav: object) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    parts = list(nav.values()) if isinstance(nav, dict) else nav if isinstance(nav, list) else []
    return [page for part in parts for page in _leaves(part)]


def _num_cells(row: str) -> int:
    return len(re.findall(r"(?<!\\)\|", row.strip()))


def _sources(folder: str) -> list[Path]:
    return list((ROOT / folder).rglob("*.py"))


def _packages(folder: Path) -> list[Path]:
    """Return the folders of Python files below ``folder``, but those of unit tests, which have the product's names."""
    folders = {path.parent for path in folder.rglob("*.py")} - {folder}
    return [path for path in folders if not {"unit", "contracts", "engine", "benchmarks"} & set(path.parts[:-1])]


def test_every_statistic_and_event_of_a_search_is_explained() -> None:
    page = _text("reference", "metrics.md")
    events = [kind for kind in get_args(get_type_hints(PipelineEvent)["kind"]) if kind != "stage"]
    for name in (*(field.name for field in fields(PipelineReport)), "overlapped_search_s", *events):
        assert f"`{name}`" in page, name
