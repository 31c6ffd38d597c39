"""The chart of examples/deployment/helm as Kubernetes gets it, and the plain manifests that are made from it.

``python -m tests.deployment.chart`` writes examples/deployment/kubernetes: ``make manifests``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from helm_python import Chart

DEPLOYMENT = Path(__file__).resolve().parents[2] / "examples" / "deployment"
CHART = DEPLOYMENT / "helm"
PLAIN = DEPLOYMENT / "kubernetes"
VALUES = {path.stem.removeprefix("values-"): path for path in sorted(CHART.glob("values-*.yaml"))}
NAME = "engine"
"""The release's name: of the plain manifests, and in the documentation."""
PLAIN_VALUES = "one-gpu"
HEADER = f"# Made from ../helm and values-{PLAIN_VALUES}.yaml by `make manifests`: change those.\n"
KUSTOMIZATION = """\
# kubectl create secret generic engine --from-literal=api-key=choose-one
# kubectl apply --kustomize examples/deployment/kubernetes
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
"""


def values_of(name: str) -> dict[str, Any]:
    """Return the values of ``helm/values-<name>.yaml``."""
    found: dict[str, Any] = yaml.safe_load(VALUES[name].read_text(encoding="utf-8"))
    return found


def whole(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` over the chart's defaults."""

    def merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
        both = {
            name: merged(under[name], value) if isinstance(value, dict) and isinstance(under.get(name), dict) else value
            for name, value in over.items()
        }
        return {**under, **both}

    return merged(yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8")), values)


def rendered(values: Mapping[str, Any]) -> dict[str, str]:
    """Return by file name what the templates make of ``values``, without those that make nothing."""
    with Chart.load(CHART) as chart:
        texts = chart.render(dict(values), name=NAME)
    return {Path(path).name: text.strip() + "\n" for path, text in texts.items() if any(yaml.safe_load_all(text))}


def objects(values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the objects that ``values`` make."""
    for text in rendered(values).values():
        yield from filter(None, yaml.safe_load_all(text))


def of_kind(made: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """Return the objects of a kind."""
    return [each for each in made if each["kind"] == kind]


def pods(made: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the templates of all pods."""
    for each in (*of_kind(made, "StatefulSet"), *of_kind(made, "Job")):
        yield each["spec"]["template"]


def containers(pod: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a pod's containers, the first ones first."""
    return [*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]]


def mib(quantity: str) -> float:
    """Return a quantity of Kubernetes in MiB."""
    return float(quantity[:-2]) * {"Mi": 1, "Gi": 1024}[quantity[-2:]]


def size_gib(option: str, arguments: list[str]) -> float:
    """Return the size that an option of ``ragcache serve`` has, 0 without the option."""
    return float(arguments[arguments.index(option) + 1].removesuffix("GiB")) if option in arguments else 0.0


def plain_manifests() -> dict[str, str]:
    """Return by file name what examples/deployment/kubernetes holds."""
    files = {name: HEADER + text for name, text in sorted(rendered(values_of(PLAIN_VALUES)).items())}
    return {**files, "kustomization.yaml": f"{KUSTOMIZATION}resources: [{', '.join(files)}]\n"}


def write_plain_manifests() -> None:
    """Replace examples/deployment/kubernetes."""
    files = plain_manifests()
    for path in PLAIN.iterdir():
        if path.name not in files:
            path.unlink()
    for name, text in files.items():
        (PLAIN / name).write_text(text, encoding="utf-8")


WORKING_HOURS = {"timezone": "UTC", "start": "0 8 * * *", "end": "0 18 * * *"}
VARIANTS: dict[str, dict[str, Any]] = {
    "loader": {
        "model": {"source": "loader", "loader": {"image": "registry.example/loader:1", "command": ["fill", "/models"]}},
        "warm": {"mode": "sidecar"},
    },
    "job": {
        "warm": {"mode": "job"},
        "auth": {"tenants": {"secret": "tenants"}},
        "networkPolicy": {"enabled": True, "clients": [{"matchLabels": {"app": "my-application"}}]},
    },
    "several-gpus": {"engine": {"gpus": 2, "vllmArgs": ["--max-model-len", "8192"], "args": ["--policy", "pgdsf"]}},
    "hpa": {
        "model": {"source": "hub", "hub": {"name": "org/model"}},
        "autoscaling": {"kind": "hpa", "min": 2, "max": 4},
        "tiers": {"disk": {"GiB": 0}, "shared": {"url": "s3://bucket/kv", "s3": {"secret": "bucket"}}},
        "networkPolicy": {"enabled": True, "egress": [{"ports": [{"port": 443}]}]},
    },
    "scale-to-zero": {"autoscaling": {"kind": "keda", "min": 0, "max": 1, "workingHours": WORKING_HOURS}},
}  # fmt: skip
"""What the three value files do not have."""
EVERY = {**{name: values_of(name) for name in VALUES}, **VARIANTS}


if __name__ == "__main__":
    write_plain_manifests()
