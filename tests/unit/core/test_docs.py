"""The documents name what is there: files, settings, options, series."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import fields
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import yaml

from ragcache_core.cli import cli
from ragcache_core.client.launch.process import GRACE_S
from ragcache_core.client.pipeline.run import PipelineEvent
from ragcache_core.config import CacheConfig
from ragcache_core.ordering import DOCUMENT_ORDERS
from ragcache_core.stats import ChunkStats, EngineStats, PipelineReport, TierStats, series_of
from ragcache_core.vllm_plugin.server.middleware import OPEN_PATHS

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
DEPLOYMENT = ROOT / "examples" / "deployment"
ARCHITECTURE = (DOCS / "architecture.md").read_text(encoding="utf-8")
HOW_IT_WORKS = (DOCS / "how-it-works.md").read_text(encoding="utf-8")
OVERLAP = (DOCS / "overlap.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *DOCS.glob("*.md")]
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
    folders = ("ragcache_core", "ragcache_integrations", "kernels", "docs", "examples", "tests")
    there = {path.name for folder in folders for path in _sources(folder)} | {path.name for path in ROOT.glob("*.py")}
    for page in PAGES:
        named = set(re.findall(r"[a-z_]+\.py\b", page.read_text(encoding="utf-8")))
        assert named - there == set(), page.name


def test_every_link_within_the_project_leads_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert target.startswith("http") or (page.parent / target).exists(), (page.name, target)


def test_every_setting_of_the_cache_is_explained_with_its_option() -> None:
    options = {param.name: param.opts[0] for param in cli.commands["serve"].params}
    for field in CacheConfig.model_fields:
        assert f"| `{field}` | `{options[field]}` |" in HOW_IT_WORKS


def test_containers_run_commands_that_are_understood_and_probe_what_answers_without_a_key() -> None:
    for dockerfile in DEPLOYMENT.glob("Dockerfile*"):
        (entry,) = re.findall(r"^ENTRYPOINT (\[.*\])$", dockerfile.read_text(encoding="utf-8"), re.MULTILINE)
        program, command, *options = json.loads(entry)
        assert (program, command) == ("ragcache", "serve")
    texts = [(DEPLOYMENT / name).read_text(encoding="utf-8") for name in ("compose.yaml", "kubernetes/engine.yaml")]
    compose, kubernetes = map(yaml.safe_load, texts)
    service, pod = compose["services"]["engine"], kubernetes["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    graces = int(service["stop_grace_period"].removesuffix("s")), pod["terminationGracePeriodSeconds"]
    for arguments, grace_s in zip((service["command"], container["args"]), graces, strict=True):
        given = cli.commands["serve"].make_context("serve", [*options, *arguments]).params
        assert (given["host"], given["log"]) == ("0.0.0.0", Path("/dev/stdout"))
        assert grace_s > given["drain"] + GRACE_S
    (port,) = (mapping["containerPort"] for mapping in container["ports"])
    assert port == given["port"]
    probes = [container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")]
    assert {probe["port"] for probe in probes} == {port}
    paths = {probe["path"] for probe in probes} | set(re.findall(r"127\.0\.0\.1:8000(/\w+)", texts[0]))
    assert paths == {"/ready", "/health"}
    assert paths <= OPEN_PATHS


def test_what_waits_for_a_warm_engine_runs_a_command_that_is_understood() -> None:
    page = (DOCS / "containers.md").read_text(encoding="utf-8")
    fragment = next(block for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if "ragcache warm" in block)
    (container,) = yaml.safe_load(fragment)
    in_the_pod, *then = container["command"][2].split(" && ")
    warm = yaml.safe_load((DEPLOYMENT / "compose.yaml").read_text(encoding="utf-8"))["services"]["warm"]
    for program, command, *options in (in_the_pod.split(), [*warm["entrypoint"], *warm["command"]]):
        assert (program, command) == ("ragcache", "warm")
        assert cli.commands["warm"].make_context("warm", options).params["wait_s"] > 0
    assert f"touch {container['readinessProbe']['exec']['command'][-1]}" in then


def test_every_file_that_a_deployment_mounts_or_builds_from_is_there() -> None:
    compose = yaml.safe_load((DEPLOYMENT / "compose.yaml").read_text(encoding="utf-8"))
    mounted = [volume.split(":")[0] for service in compose["services"].values() for volume in service["volumes"]]
    files = [source for source in mounted if source.endswith((".yml", ".yaml", ".json"))]
    assert len(files) >= 5
    assert [source for source in files if not (DEPLOYMENT / source).is_file()] == []
    listed = yaml.safe_load((DEPLOYMENT / "kubernetes" / "kustomization.yaml").read_text(encoding="utf-8"))["resources"]
    assert {*listed, "kustomization.yaml"} == {path.name for path in (DEPLOYMENT / "kubernetes").iterdir()}


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


def _sources(folder: str) -> list[Path]:
    return list((ROOT / folder).rglob("*.py"))


def _packages(folder: Path) -> list[Path]:
    """Return the folders of Python files below ``folder``, but those of unit tests, which have the product's names."""
    folders = {path.parent for path in folder.rglob("*.py")} - {folder}
    return [path for path in folders if not {"unit", "contracts", "engine", "benchmarks"} & set(path.parts[:-1])]
