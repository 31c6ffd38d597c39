"""The files of examples/deployment run commands that exist, on images that install what these commands need."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
import yaml

from ragcache_core.cli import cli
from ragcache_core.client.launch.probes import LIVE
from ragcache_core.client.launch.process import GRACE_S
from ragcache_core.vllm_plugin.server.middleware import OPEN_PATHS
from tests.installation.serving_requirements import needed, serving_lines

ROOT = Path(__file__).resolve().parents[3]
DEPLOYMENT = ROOT / "examples" / "deployment"
IMAGES = sorted(DEPLOYMENT.glob("Dockerfile*"))
CONTAINERS_PAGE = (ROOT / "docs" / "operate" / "containers.md").read_text(encoding="utf-8")
COMPOSE = yaml.safe_load((DEPLOYMENT / "compose.yaml").read_text(encoding="utf-8"))
STATEFUL_SET = yaml.safe_load((DEPLOYMENT / "kubernetes" / "engine.yaml").read_text(encoding="utf-8"))
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

FEATURES = """
import importlib.abc, sys
from pathlib import Path
missing, folder = {missing!r}, Path({folder!r})
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in missing:
            raise ModuleNotFoundError(f"{{name}} is not on the image", name=name)
sys.meta_path.insert(0, Missing())
from ragcache_core import Document, DocumentStore
from ragcache_core.chunkstore.remote import open_remote
from ragcache_core.chunkstore.encryption import load_keys
for url in ("redis://127.0.0.1:6379/0", "s3://bucket/prefix"):
    open_remote(url).close()  # serve --shared
(folder / "key").write_text("A" * 43 + "=")
load_keys(folder / "key")  # serve --disk-key-file
with DocumentStore.create(folder / "store") as store:
    store.put([Document("one", "Our office opens at nine.")])
    assert store.search("office", k=1)  # warm --store
"""
"""What the commands of the images offer, without the modules that an image does not install."""


def instructions(dockerfile: Path) -> dict[str, str]:
    """Return the last instruction of each kind of a Dockerfile, its continued lines joined."""
    text = dockerfile.read_text(encoding="utf-8").replace("\\\n", " ")
    return dict(line.split(None, 1) for line in text.splitlines() if re.match(r"[A-Z]+ ", line))


def arguments_of(entry: list[str], command: list[str], of: str) -> dict[str, Any]:
    """Return what our command line makes of a container's arguments."""
    program, name, *options = [*entry, *command]
    assert (program, name) == ("ragcache", of)
    return cli.commands[of].make_context(of, options).params


def distributions(requirements: list[str]) -> set[str]:
    """Return the distributions that requirements name, those of our own extras in their place."""
    found = set[str]()
    for requirement in requirements:
        name, extras = re.match(r"([\w.-]+)(?:\[([\w,.-]+)\])?", requirement).groups()  # type: ignore[union-attr]
        if name == "ragcache":
            for extra in extras.split(","):
                found |= distributions(PYPROJECT["optional-dependencies"][extra])
        else:
            found.add(name.lower())
    return found


def installed_on(dockerfile: Path) -> set[str]:
    """Return the distributions of ours and our extras that an image installs."""
    run = dockerfile.read_text(encoding="utf-8")
    if locks := re.findall(r"make setup .*LOCK=(\S+)", run):
        return distributions(re.findall(r"^([\w.-]+)==", (ROOT / locks[0]).read_text("utf-8"), re.MULTILINE))
    (extras,) = re.findall(r'pip install "\$\(echo /wheels/\*\.whl\)\[([\w,-]+)\]"', run)
    return distributions([f"ragcache[{extras}]"]) | distributions(PYPROJECT["dependencies"])


@pytest.mark.parametrize("dockerfile", IMAGES, ids=lambda path: path.name)
def test_an_image_runs_a_command_that_is_understood_as_shipped(dockerfile: Path) -> None:
    parts = instructions(dockerfile)
    entry, command = json.loads(parts["ENTRYPOINT"]), json.loads(parts.get("CMD", '["/models/my-model"]'))
    given = arguments_of(entry, command, "serve")
    assert (given["host"], given["log"]) == ("0.0.0.0", Path("/dev/stdout"))
    copied = dict(re.findall(r"COPY --from=build /src/(\S+) (\S+)", dockerfile.read_text(encoding="utf-8")))
    for source, target in copied.items():
        assert given["model"] == target
        assert (ROOT / source).is_dir()


@pytest.mark.parametrize("dockerfile", IMAGES, ids=lambda path: path.name)
def test_an_image_installs_what_the_shipped_commands_need(dockerfile: Path, tmp_path: Path) -> None:
    of_extras = {name for extra in PYPROJECT["optional-dependencies"] for name in distributions([f"ragcache[{extra}]"])}
    on_image = installed_on(dockerfile)
    of_engine = distributions(["ragcache[gpu,cpu]"])
    missing = {
        module
        for module, names in packages_distributions().items()
        if {name.lower() for name in names} & of_extras
        and not {name.lower() for name in names} & (on_image | of_engine)
    }
    code = FEATURES.format(missing=missing, folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-1000:]


def test_images_install_what_a_server_needs_of_the_lock_and_no_more() -> None:
    assert (ROOT / "requirements" / "serve.txt").read_text(encoding="utf-8") == serving_lines()
    assert not {"pytest", "mypy", "langchain", "jupyter-client"} & needed()


def test_containers_run_commands_that_are_understood_and_probe_what_answers_without_a_key() -> None:
    (*_, entry) = (json.loads(instructions(dockerfile)["ENTRYPOINT"]) for dockerfile in IMAGES)
    service, pod = COMPOSE["services"]["engine"], STATEFUL_SET["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    graces = int(service["stop_grace_period"].removesuffix("s")), pod["terminationGracePeriodSeconds"]
    for arguments, grace_s in zip((service["command"], container["args"]), graces, strict=True):
        given = arguments_of(entry, arguments, "serve")
        assert grace_s > given["drain"] + GRACE_S
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    given = arguments_of(entry, container["args"], "serve")
    assert ports == {"http": given["port"], "live": given["probe_port"]}
    live, ready = (container[f"{kind}Probe"]["httpGet"] for kind in ("liveness", "readiness"))
    assert (live["port"], live["path"]) == ("live", LIVE)
    assert (ready["port"], ready["path"]) == ("http", "/ready")
    paths = set(re.findall(r"127\.0\.0\.1:8000(/\w+)", " ".join(service["healthcheck"]["test"])))
    assert paths == {"/ready"}
    assert paths <= OPEN_PATHS


def test_what_waits_for_a_warm_engine_runs_a_command_that_is_understood() -> None:
    fragments = re.findall(r"```yaml\n(.*?)```", CONTAINERS_PAGE, re.DOTALL)
    (container,) = yaml.safe_load(next(fragment for fragment in fragments if "ragcache warm" in fragment))
    in_the_pod, *then = container["command"][2].split(" && ")
    warm = COMPOSE["services"]["warm"]
    for program, command, *options in (in_the_pod.split(), [*warm["entrypoint"], *warm["command"]]):
        assert arguments_of([program, command], options, "warm")["wait_s"] > 0
    assert f"touch {container['readinessProbe']['exec']['command'][-1]}" in then


@pytest.mark.parametrize("dockerfile", IMAGES, ids=lambda path: path.name)
def test_an_image_runs_as_a_user_and_keeps_its_caches_on_its_volume(dockerfile: Path) -> None:
    parts = instructions(dockerfile)
    assert parts["USER"] == "10001"
    variables = dict(each.split("=", 1) for each in parts["ENV"].split())
    for name in ("HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "VLLM_CACHE_ROOT"):
        assert variables[name].startswith(parts["VOLUME"] + "/"), name


def test_the_warm_service_of_compose_reads_a_store_that_is_mounted() -> None:
    warm = COMPOSE["services"]["warm"]
    store = warm["command"][warm["command"].index("--store") + 1]
    assert any(store.startswith(volume.split(":")[1] + "/") for volume in warm["volumes"])


def test_every_file_that_a_deployment_mounts_or_builds_from_is_there() -> None:
    mounted = [volume.split(":")[0] for service in COMPOSE["services"].values() for volume in service["volumes"]]
    files = [source for source in mounted if source.endswith((".yml", ".yaml", ".json"))]
    assert len(files) >= 5
    assert [source for source in files if not (DEPLOYMENT / source).is_file()] == []
    listed = yaml.safe_load((DEPLOYMENT / "kubernetes" / "kustomization.yaml").read_text(encoding="utf-8"))["resources"]
    assert {*listed, "kustomization.yaml"} == {path.name for path in (DEPLOYMENT / "kubernetes").iterdir()}


def test_workflows_name_actions_by_commit() -> None:
    used = [
        line
        for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))
        for line in re.findall(r"uses: (.*)", path.read_text(encoding="utf-8"))
    ]
    assert len(used) >= 10
    assert [line for line in used if not re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line)] == []
    commits = {}
    for line in used:
        action, _, commit = line.partition("@")
        assert commits.setdefault(action, commit) == commit, "one commit of an action everywhere"
