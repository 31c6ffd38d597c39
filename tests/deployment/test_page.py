"""The commands and manifests of docs/operate/containers.md, as far as client programs carry them out without a cluster.

kubectl and Compose are asked where they are installed; ``make check-manifests`` names those that are missing.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.deployment.chart import CHART, DEPLOYMENT, NAME, PLAIN, objects, plain_manifests, values_of

ROOT = DEPLOYMENT.parents[1]
PAGE = (ROOT / "docs" / "operate" / "containers.md").read_text(encoding="utf-8")
TERRAFORM = DEPLOYMENT / "terraform"
KEY = "choose-one"


def commands(program: str) -> list[list[str]]:
    """Return the page's commands of a program, each as its words; what stands before ``&&`` is one of its own."""
    lines = [line for block in re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
    spans = re.findall(rf"`((?:[A-Z_]+=\S+ )?{program} [^`]+)`", PAGE.replace("\n", " "))
    parts = [part for line in lines for part in line.removeprefix("$ ").split(" && ")]
    words = [shlex.split(text) for text in (*parts, *spans)]
    return [each for each in words if program in each[:2]]


def named(words: list[str], option: str) -> list[str]:
    """Return the values of an option that may be given several times."""
    return [value for before, value in pairwise(words) if before == option]


def given(words: list[str]) -> dict[str, Any]:
    """Return the values that a command of helm gives the chart."""
    made: dict[str, Any] = {}
    for path in named(words, "--values"):
        made |= yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))
    for setting in named(words, "--set"):
        at, (path, value) = made, setting.split("=", 1)
        *folders, last = path.split(".")
        for folder in folders:
            at = at.setdefault(folder, {})
        at[last] = yaml.safe_load(value)
    return made


def releases() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each command of helm that installs our chart, and its values after those of a former release."""
    before: dict[str, Any] = {}
    for words in commands("helm"):
        if str(CHART.relative_to(ROOT)) not in words:
            continue
        assert words[2] == NAME, "the names of the services on the page are those of this release"
        before = {**before, **given(words)} if "--reuse-values" in words else given(words)
        yield " ".join(words), before


@pytest.mark.parametrize(
    ("command", "values"), list(releases()), ids=lambda each: each if isinstance(each, str) else ""
)
def test_helm_takes_the_values_of_the_page(command: str, values: dict[str, Any]) -> None:
    (engine,) = (each for each in objects(values) if each["kind"] == "StatefulSet")
    assert engine["metadata"]["name"] == NAME
    assert engine["spec"]["replicas"] == values.get("replicas", 1)
    assert "registry.example/ragcache" in engine["spec"]["template"]["spec"]["containers"][0]["image"]


def test_the_page_installs_an_empty_release_fills_its_claim_and_starts_it() -> None:
    counts = [values.get("replicas", 1) for command, values in releases()]
    assert counts == [1, 0, 1]
    (fill,) = (
        found
        for fragment in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
        for found in yaml.safe_load_all(fragment)
        if isinstance(found, dict) and found.get("kind") == "Pod"
    )
    kubernetes_validate.validate(fill, "1.37", strict=True)
    made = list(objects(values_of("one-gpu")))
    (claim,) = (each for each in made if each["kind"] == "PersistentVolumeClaim")
    (engine,) = (each["spec"]["template"]["spec"] for each in made if each["kind"] == "StatefulSet")
    (volume,) = fill["spec"]["volumes"]
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    (container,) = fill["spec"]["containers"]
    security = {**fill["spec"]["securityContext"], **container["securityContext"]}
    assert security["runAsNonRoot"] is True
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert (security["allowPrivilegeEscalation"], security["capabilities"]) == (False, {"drop": ["ALL"]})
    assert fill["spec"]["securityContext"]["fsGroup"] == engine["securityContext"]["fsGroup"]
    assert [each["key"] for each in fill["spec"]["tolerations"]] == [each["key"] for each in engine["tolerations"]]
    (copied,) = (words for words in commands("kubectl") if "cp" in words)
    pod, target = copied[-1].split(":")
    assert pod == fill["metadata"]["name"]
    assert target.startswith(container["volumeMounts"][0]["mountPath"] + "/")
    assert target == engine["containers"][0]["args"][0], "where the engine reads them"


def test_terraform_knows_the_variables_outputs_and_files_of_the_page() -> None:
    declared = {path.name: path.read_text(encoding="utf-8") for path in TERRAFORM.glob("*.tf")}
    text = "\n".join(declared.values())
    used = commands("terraform")
    variables = [value.partition("=")[0] for words in used for value in named(words, "-var")]
    assert {"alarm_email", "endpoint_cidrs"} <= {*variables}
    assert [name for name in variables if f'variable "{name}"' not in text] == []
    without_default = {
        name
        for name, body in re.findall(r'^variable "(\w+)" \{(.*?)^\}', text, re.MULTILINE | re.DOTALL)
        if "default" not in body
    }
    (applied,) = (words for words in used if "apply" in words)
    assert without_default == {value.partition("=")[0] for value in named(applied, "-var")}
    outputs = [words[-1] for words in used if words[:2] == ["terraform", "output"]]
    assert outputs
    assert [name for name in outputs if f'output "{name}"' not in text] == []
    files = re.findall(r"-var-file (\S+?\.tfvars)", PAGE)
    assert {*files} == {path.name for path in TERRAFORM.glob("*.tfvars")}
    (configured,) = (words for words in commands("aws") if "update-kubeconfig" in words)
    for option, variable in (
        ("--region", r'variable "region" \{[^}]*default = "([\w-]+)"'),
        ("--name", r'cluster_name += "(\w+)"'),
    ):
        assert named(configured, option) == re.findall(variable, text)


def planned(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Plan with the variables of the Terraform example alone, for which no provider is downloaded."""
    for path in (TERRAFORM / "variables.tf", *TERRAFORM.glob("*.tfvars")):
        (folder / path.name).write_bytes(path.read_bytes())
    return subprocess.run(
        ["terraform", "plan", "-input=false", "-no-color", *options],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.skipif(shutil.which("terraform") is None, reason="terraform is not installed")
def test_terraform_takes_the_pages_variables_and_variants_and_keeps_the_api_closed_to_all_addresses(
    tmp_path: Path,
) -> None:
    (words,) = (words for words in commands("terraform") if "apply" in words)
    options = words[words.index("apply") + 1 :]
    variants = re.findall(r"-var-file (\S+?\.tfvars)", PAGE)
    assert len(variants) >= 3
    for more in ([], *(["-var-file", name] for name in variants), ["-var", "endpoint_cidrs=[]"]):
        done = planned(tmp_path, *options, *more)
        assert (done.returncode, "undeclared" in done.stdout + done.stderr) == (0, False), done.stderr + done.stdout
    for bad, why in (
        ('endpoint_cidrs=["0.0.0.0/0"]', "endpoint_cidrs opens the API to everybody"),
        ("capacity_type=CHEAP", "capacity_type is ON_DEMAND or SPOT"),
    ):
        done = planned(tmp_path, *options, "-var", bad)
        assert done.returncode == 1
        assert why in " ".join(done.stderr.split())


kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")


def output(*command: str, **variables: str) -> str:
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@kubectl
def test_kubectl_makes_the_chart_s_objects_of_the_plain_manifests() -> None:
    (applied,) = (words for words in commands("kubectl") if "--kustomize" in words)
    made = [*yaml.safe_load_all(output("kubectl", "kustomize", applied[-1]))]
    wanted = [each for text in plain_manifests().values() for each in yaml.safe_load_all(text)]
    assert ROOT / applied[-1] == PLAIN

    def ordered(them: list[Any]) -> list[Any]:
        real = [each for each in them if each and each["kind"] != "Kustomization"]
        return sorted(real, key=lambda each: (each["kind"], each["metadata"]["name"]))

    assert ordered(made) == ordered(wanted)


@kubectl
def test_kubectl_makes_the_secret_that_the_engine_reads() -> None:
    (words,) = (words for words in commands("kubectl") if words[1:4] == ["create", "secret", "generic"])
    secret = yaml.safe_load(output(*words, "--dry-run=client", "--output", "yaml"))
    (engine,) = (each for each in objects(values_of("one-gpu")) if each["kind"] == "StatefulSet")
    (variable,) = engine["spec"]["template"]["spec"]["containers"][0]["env"]
    reference = variable["valueFrom"]["secretKeyRef"]
    assert reference == {"name": secret["metadata"]["name"], "key": next(iter(secret["data"]))}


def compose_program() -> list[str]:
    """Return the program of Compose that is installed, none for neither."""
    plugin = (
        subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
        if shutil.which("docker")
        else None
    )
    if plugin is not None and plugin.returncode == 0:
        return ["docker", "compose"]
    return ["docker-compose"] if shutil.which("docker-compose") else []


COMPOSE = compose_program()


@pytest.mark.skipif(not COMPOSE, reason="docker compose is not installed")
@pytest.mark.parametrize("words", [each for each in commands("docker") if {"up", "run"} & {*each[2:]}], ids=" ".join)
def test_compose_reads_its_file_as_the_commands_of_the_page_name_it(words: list[str]) -> None:
    place = words.index("docker")
    variables = dict(word.split("=", 1) for word in words[:place])
    options = words[place + 2 : next(at for at, word in enumerate(words) if word in ("up", "run"))]
    found = yaml.safe_load(output(*COMPOSE, *options, "config", **variables, RAGCACHE_API_KEY=KEY))["services"]
    assert {"engine", "prometheus", "grafana", *named(options, "--profile")} <= found.keys()
    dockerfile = found["engine"]["build"]["dockerfile"]
    assert dockerfile == variables.get("DOCKERFILE", "examples/deployment/Dockerfile")
    assert (ROOT / dockerfile).is_file()
    assert found["engine"]["environment"] == {"RAGCACHE_API_KEY": KEY}


@pytest.mark.skipif(not COMPOSE, reason="docker compose is not installed")
def test_compose_asks_for_the_key_that_is_missing() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RAGCACHE_API_KEY"}
    command = [*COMPOSE, "-f", str(DEPLOYMENT / "compose.yaml"), "config"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "RAGCACHE_API_KEY" in done.stderr
