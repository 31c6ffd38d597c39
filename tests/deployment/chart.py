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


def rendered(values: Mapping[str, Any]) -> dict[str, str]:
    """Return by file name what the templates make of ``values``, without those that make nothing."""
    with Chart.load(CHART) as chart:
        texts = chart.render(dict(values), name=NAME)
    return {Path(path).name: text.strip() + "\n" for path, text in texts.items() if any(yaml.safe_load_all(text))}


def objects(values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the objects that ``values`` make."""
    for text in rendered(values).values():
        yield from filter(None, yaml.safe_load_all(text))


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


if __name__ == "__main__":
    write_plain_manifests()
