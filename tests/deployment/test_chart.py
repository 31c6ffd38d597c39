"""The chart renders what Kubernetes takes and what fits the nodes of the Terraform example, and refuses bad values."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import hcl2
import kubernetes_validate
import pytest
import yaml
from cloudcoil.models.keda.v1alpha1 import ScaledObject
from cloudcoil.models.prometheus_operator.v1 import PrometheusRule, ServiceMonitor
from helm_python.chart import lint
from helm_python.errors import HelmError
from pydantic import ValidationError

from tests.deployment.chart import (
    CHART,
    DEPLOYMENT,
    EVERY,
    PLAIN,
    VARIANTS,
    WORKING_HOURS,
    containers,
    mib,
    objects,
    of_kind,
    plain_manifests,
    pods,
    size_gib,
    values_of,
    whole,
)

TERRAFORM = DEPLOYMENT / "terraform"
CORE = re.compile(r"^(v1|(apps|batch|autoscaling|policy|networking\.k8s\.io)/v\d)$")
"""API groups with schemas in kubernetes-validate."""
CUSTOM = {model.__name__: model for model in (ScaledObject, PrometheusRule, ServiceMonitor)}
"""Models of what KEDA 2.16 and the Prometheus Operator 0.80 publish as their schemas."""
NODES = {"g5.2xlarge": (8, 32), "g6.2xlarge": (8, 32), "t3.large": (2, 8)}
"""CPUs and GiB of the instance types that the Terraform example names."""
NODE_CPU, NODE_GIB = 0.5, 3.0
"""What system, kubelet and the cluster's own pods take of a node, generously."""
IMAGE_GIB = 50
"""Of a GPU node's disk: the image has 20 GB unpacked and pulls as much again; models and caches are on volumes."""
EFFECTS = {"NO_SCHEDULE": "NoSchedule", "NO_EXECUTE": "NoExecute", "PREFER_NO_SCHEDULE": "PreferNoSchedule"}
"""Kubernetes' names of taints, by those of EKS."""
CORE_PACKAGE = DEPLOYMENT.parents[1] / "ragcache_core"
VARIABLES_OF = ("runtime/environment.py", "config.py", "chunkstore/encryption.py")
"""The modules that name the environment variables of secrets; this environment does not have their imports."""


@pytest.mark.parametrize("name", EVERY)
def test_the_chart_has_no_lint(name: str) -> None:
    report = lint(CHART, EVERY[name], strict=True)
    assert report["errors"] == []
    assert [each for each in report["messages"] if each["severity"] > 1] == []


def test_kubernetes_keda_and_prometheus_take_what_is_made(made: list[dict[str, Any]]) -> None:
    assert len(made) >= 4
    for each in made:
        if CORE.match(each["apiVersion"]):
            kubernetes_validate.validate(each, "1.37", strict=True)
        else:
            CUSTOM[each["kind"]].model_validate(each, extra="forbid")


@pytest.mark.parametrize(
    ("kind", "place", "value"),
    [
        ("ScaledObject", ["spec", "maxReplicaCounts"], 3),
        ("ScaledObject", ["spec", "triggers"], None),
        ("ScaledObject", ["spec", "triggers", 0, "metricType"], 1),
        ("ScaledObject", ["spec", "triggers", 0, "metadata", "threshold"], 8),
        ("ScaledObject", ["spec", "advanced", "horizontalPodAutoscalerConfig", "behaviour"], {}),
        ("ServiceMonitor", ["spec", "endpoints", 0, "scheme"], "ftp"),
        ("PrometheusRule", ["spec", "groups", 0, "rules", 0, "expr"], None),
    ],
)
def test_schemas_of_keda_and_prometheus_reject_mistakes(kind: str, place: list[str | int], value: object) -> None:
    (made,) = of_kind(list(objects(values_of("three-replicas"))), kind)
    at: Any = made
    for key in place[:-1]:
        at = at[key]
    at[place[-1]] = value
    with pytest.raises(ValidationError):
        CUSTOM[kind].model_validate(made, extra="forbid")


def test_names_are_unique_and_all_that_is_referred_to_exists(made: list[dict[str, Any]]) -> None:
    names = [(each["kind"], each["metadata"]["name"]) for each in made]
    assert len(names) == len(set(names))
    for pod in pods(made):
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        claimed = {
            template["metadata"]["name"]
            for each in of_kind(made, "StatefulSet")
            for template in each["spec"]["volumeClaimTemplates"]
        }
        mounted = {mount["name"] for container in containers(pod) for mount in container["volumeMounts"]}
        assert mounted <= volumes.keys() | claimed
        assert volumes.keys() <= mounted
        claims = [
            volume["persistentVolumeClaim"]["claimName"]
            for volume in volumes.values()
            if "persistentVolumeClaim" in volume
        ]
        assert {("PersistentVolumeClaim", claim) for claim in claims} <= set(names)
        assert ("ServiceAccount", pod["spec"]["serviceAccountName"]) in names
    (engine,) = of_kind(made, "StatefulSet")
    assert ("Service", engine["spec"]["serviceName"]) in names
    labels = engine["spec"]["template"]["metadata"]["labels"]
    selectors = [each["spec"]["selector"] for each in of_kind(made, "Service")]
    selectors += [each["spec"]["selector"]["matchLabels"] for each in of_kind(made, "PodDisruptionBudget")]
    selectors += [each["spec"]["podSelector"]["matchLabels"] for each in of_kind(made, "NetworkPolicy")]
    for selector in [*selectors, engine["spec"]["selector"]["matchLabels"]]:
        assert selector.items() <= labels.items()
    for monitor in of_kind(made, "ServiceMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        (watched,) = [each for each in of_kind(made, "Service") if wanted <= each["metadata"]["labels"].items()]
        assert monitor["spec"]["endpoints"][0]["port"] in {port["name"] for port in watched["spec"]["ports"]}
    for scaler in (*of_kind(made, "HorizontalPodAutoscaler"), *of_kind(made, "ScaledObject")):
        target = scaler["spec"]["scaleTargetRef"]
        assert (target["kind"], target["name"]) in names
        assert "replicas" not in engine["spec"], "an upgrade would undo the scaling"


def test_pods_are_restricted(made: list[dict[str, Any]]) -> None:
    """As of the Pod Security Standards' profile `restricted`, and with a read-only root."""
    for pod in pods(made):
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
        for container in containers(pod):
            security = container["securityContext"]
            assert (security["readOnlyRootFilesystem"], security["allowPrivilegeEscalation"]) == (True, False)
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert {"memory"} <= container["resources"]["limits"].keys()
            writable = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
            assert "/tmp" in writable


def test_memory_and_volumes_hold_the_tiers(made: list[dict[str, Any]]) -> None:
    (engine,) = of_kind(made, "StatefulSet")
    (pod,) = pods([engine])
    container = pod["spec"]["containers"][0]
    arguments, resources = container["args"], container["resources"]
    assert resources["requests"]["memory"] == resources["limits"]["memory"], "host memory is used: no overcommitment"
    shm = next(volume["emptyDir"] for volume in pod["spec"]["volumes"] if volume["name"] == "shm")
    kv_gib = 0.0 if "nvidia.com/gpu" in resources["limits"] else size_gib("--kv-cache-bytes", arguments)
    tiers_mib = 1024 * (size_gib("--host-bytes", arguments) + kv_gib) + mib(shm["sizeLimit"])
    assert mib(resources["limits"]["memory"]) >= tiers_mib + 1024, "the engine itself needs memory"
    (claim,) = engine["spec"]["volumeClaimTemplates"]
    storage_gib = mib(claim["spec"]["resources"]["requests"]["storage"]) / 1024
    assert storage_gib >= size_gib("--disk-bytes", arguments) + 1


def test_liveness_does_not_depend_on_the_engine_and_the_grace_period_fits_the_drain(made: list[dict[str, Any]]) -> None:
    (pod,) = pods(of_kind(made, "StatefulSet"))
    container = pod["spec"]["containers"][0]
    arguments, ports = container["args"], {port["name"]: port["containerPort"] for port in container["ports"]}
    live, ready = container["livenessProbe"]["httpGet"], container["readinessProbe"]["httpGet"]
    assert (live["path"], ready["path"]) == ("/live", "/ready")
    assert str(ports[live["port"]]) == arguments[arguments.index("--probe-port") + 1]
    assert ports[ready["port"]] == 8000
    delay_s = int(container["lifecycle"]["preStop"]["exec"]["command"][-1])
    drain_s = float(arguments[arguments.index("--drain") + 1])
    assert pod["spec"]["terminationGracePeriodSeconds"] > delay_s + drain_s + 20


def test_a_limit_of_the_shared_store_reaches_every_replica() -> None:
    made = list(objects(values_of("three-replicas")))
    (pod,) = pods(of_kind(made, "StatefulSet"))
    arguments = pod["spec"]["containers"][0]["args"]
    assert size_gib("--shared-bytes", arguments) == values_of("three-replicas")["tiers"]["shared"]["GiB"]
    (plain,) = pods(of_kind(list(objects(values_of("one-gpu"))), "StatefulSet"))
    assert "--shared-bytes" not in plain["spec"]["containers"][0]["args"]


def test_replicas_that_only_read_the_shared_store_say_so_to_the_engine() -> None:
    values = whole({"tiers": {"shared": {"url": "s3://bucket/kv", "readOnly": True}}})
    (pod,) = pods(of_kind(list(objects(values)), "StatefulSet"))
    assert "--shared-read-only" in pod["spec"]["containers"][0]["args"]
    (plain,) = pods(of_kind(list(objects(values_of("three-replicas"))), "StatefulSet"))
    assert "--shared-read-only" not in plain["spec"]["containers"][0]["args"]


def test_a_network_policy_lets_the_job_that_warms_in() -> None:
    made = list(objects(VARIANTS["job"]))
    (policy,), (job,) = of_kind(made, "NetworkPolicy"), of_kind(made, "Job")
    allowed = [peer["podSelector"]["matchLabels"] for peer in policy["spec"]["ingress"][0]["from"]]
    labels = job["spec"]["template"]["metadata"]["labels"]
    assert any(selector.items() <= labels.items() for selector in allowed)


def test_rules_are_those_of_the_monitoring_example(made: list[dict[str, Any]]) -> None:
    ours = yaml.safe_load((DEPLOYMENT.parent / "monitoring" / "ragcache-rules.yml").read_text(encoding="utf-8"))
    for rules in of_kind(made, "PrometheusRule"):
        assert rules["spec"] == ours


@pytest.mark.parametrize(
    ("values", "names"), [("one-gpu", ["spot", "scale-to-zero"]), ("three-replicas", ["three-replicas"])]
)
def test_requests_fit_the_nodes_of_terraform(values: str, names: list[str]) -> None:
    made = list(objects(values_of(values)))
    (pod,) = pods(of_kind(made, "StatefulSet"))
    requests = [container["resources"]["requests"] for container in containers(pod)]
    cpu, gib = sum(float(each["cpu"]) for each in requests), sum(mib(each["memory"]) for each in requests) / 1024
    defaults = variables()
    for variant in ({}, *(terraform(TERRAFORM / f"{name}.tfvars") for name in names)):
        given = {**defaults, **variant}
        for instance in given["instance_types"]:
            node_cpu, node_gib = NODES[unquoted(instance)]
            assert (cpu <= node_cpu - NODE_CPU, gib <= node_gib - NODE_GIB) == (True, True), instance
    largest = max(
        int(each["spec"].get("maxReplicaCount", 0)) for each in (*of_kind(made, "ScaledObject"), {"spec": {}})
    )
    given = {**defaults, **terraform(TERRAFORM / f"{names[0]}.tfvars")} if values == "three-replicas" else defaults
    assert number(given["gpu_nodes"]["max"]) >= max(largest, values_of(values).get("replicas", 1))


@pytest.mark.parametrize("name", ["one-gpu", "three-replicas"])
def test_claims_ask_for_a_storage_class_of_terraform_and_a_mode_that_it_has(name: str) -> None:
    (classes,) = [
        each for each in terraform(TERRAFORM / "storage.tf")["resource"] if '"kubernetes_storage_class_v1"' in each
    ]
    (storage_class,) = classes['"kubernetes_storage_class_v1"'].values()
    assert unquoted(storage_class["storage_provisioner"]) == "ebs.csi.aws.com"
    made = list(objects(values_of(name)))
    (engine,) = of_kind(made, "StatefulSet")
    for claim in (*of_kind(made, "PersistentVolumeClaim"), *engine["spec"]["volumeClaimTemplates"]):
        assert claim["spec"]["storageClassName"] == unquoted(storage_class["metadata"][0]["name"])
        assert claim["spec"]["accessModes"] == ["ReadWriteOnce"], "EBS attaches a volume to one node"


def test_terraform_makes_the_secret_that_the_chart_reads() -> None:
    (secrets,) = [each for each in terraform(TERRAFORM / "secrets.tf")["resource"] if '"kubernetes_secret_v1"' in each]
    (secret,) = secrets['"kubernetes_secret_v1"'].values()
    wanted = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))["auth"]["apiKey"]
    assert unquoted(secret["metadata"][0]["name"]) == wanted["secret"]
    assert [unquoted(key) for key in secret["data"]] == [wanted["key"]]


def test_plain_manifests_are_what_the_chart_makes() -> None:
    assert {path.name: path.read_text(encoding="utf-8") for path in PLAIN.iterdir()} == plain_manifests(), (
        "run: make manifests"
    )


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"replica": 3}, "replica"),
        ({"replicas": -1}, "minimum"),
        ({"image": {"digest": "sha256:1234"}}, "digest"),
        ({"auth": {"apiKey": {"secret": ""}}}, "secret"),
        ({"model": {"source": "s3"}}, "source"),
        ({"model": {"path": "my-model"}}, "path"),
        ({"tiers": {"shared": {"url": "redis://:secret@redis:6379/0"}}}, "url"),
        ({"tiers": {"hostGiB": "64GiB"}}, "hostGiB"),
        ({"tiers": {"shared": {"GiB": 200}}}, "tiers.shared.GiB"),
        ({"engine": {"gpus": 0}}, "engine.kvCacheGiB"),
        ({"model": {"source": "hub"}}, "model.hub.name"),
        ({"model": {"source": "loader"}}, "model.loader.image"),
        ({"replicas": 2}, "ReadOnlyMany"),
        ({"replicas": 2, "model": {"claim": {"accessMode": "ReadOnlyMany"}}, "warm": {"mode": "job"}}, "sidecar"),
        ({"warm": {"mode": "sidecar", "store": "/stores/mine"}}, "/models/"),
        ({"warm": {"mode": "job"}, "model": {"source": "hub", "hub": {"name": "org/model"}}}, "volume"),
        ({"auth": {"tenants": {"secret": "tenants"}}, "monitoring": {"serviceMonitor": {"enabled": True}}}, "token"),
        ({"autoscaling": {"kind": "hpa", "min": 3, "max": 1}}, "autoscaling.max"),
        ({"autoscaling": {"kind": "hpa", "min": 0, "max": 1}}, "workingHours"),
        ({"autoscaling": {"kind": "hpa", "max": 1, "workingHours": WORKING_HOURS}}, "workingHours"),
        ({"autoscaling": {"kind": "keda", "max": 1, "workingHours": {"start": "0 8 * * *"}}}, "workingHours"),
        ({"autoscaling": {"kind": "keda", "max": 1, "prometheusUrl": ""}}, "autoscaling.prometheusUrl"),
        ({"tiers": {"hostGiB": -1}}, "/tiers/hostGiB"),
        ({"tiers": {"hostGiB": None}}, "hostGiB"),
        ({"tiers": {"shared": {"ttlSeconds": 60}}}, "tiers.shared.url"),
        ({"tiers": {"shared": {"readOnly": True}}}, "tiers.shared.url"),
        ({"tiers": {"shared": {"url": "s3://bucket/kv", "readOnly": True, "GiB": 5}}}, "readOnly is true, GiB is 5"),
        ({"tiers": {"shared": {"password": {"secret": "redis"}}}}, "tiers.shared.url"),
        ({"tiers": {"disk": {"GiB": 0, "key": {"secret": "disk"}}}}, "tiers.disk.key.secret"),
        ({"model": {"claim": {"name": ""}}}, "/model/claim/name"),
        ({"model": {"claim": {"size": "0Gi"}}}, "/model/claim/size"),
        ({"model": {"path": "/weights/my-model"}}, "model.path is /weights/my-model"),
        ({"auth": {"tenants": {"secret": "tenants", "key": "folder/tenants.toml"}}}, "/auth/tenants/key"),
        ({"engine": {"gpus": 4}}, "engine.shmGiB"),
        ({"engine": {"args": ["--host-bytes=64GiB"]}}, "tiers.hostGiB"),
        ({"engine": {"args": ["--port", "9000"]}}, "--port"),
        ({"networkPolicy": {"enabled": True}, "tiers": {"shared": {"url": "s3://bucket/kv"}}}, "networkPolicy.egress"),
        ({**VARIANTS["loader"], "warm": {"mode": "job"}}, "warm.mode is job and model.source is loader"),
        ({"engine": {"args": ["--no-cache"]}}, "--no-cache"),
        ({"engine": {"vllmArgs": ["--port=9000"]}}, "engine.vllmArgs has --port"),
        ({"engine": {"vllmArgs": ["--api-key", "mine"]}}, "engine.vllmArgs has --api-key"),
        ({"engine": {"env": [{"name": "LEVEL", "value": 3}]}}, "/engine/env"),
        ({"tiers": {"shared": {"url": "file:///folder"}}}, "/tiers/shared/url"),
        ({"tiers": {"shared": {"url": "redis://redis:6379/0", "s3": {"secret": "bucket"}}}}, "s3.secret"),
        ({"tiers": {"shared": {"url": "s3://bucket/kv", "password": {"secret": "redis"}}}}, "password.secret"),
        ({**VARIANTS["hpa"], "replicas": 5}, "replicas is 5 and autoscaling.max is 4"),
        ({"autoscaling": {"kind": "keda", "max": 1, "workingHours": {**WORKING_HOURS, "start": "8 am"}}}, "/start"),
        ({"tolerations": [{"key": "gpu", "effects": "NoSchedule"}]}, "/tolerations"),
        ({"networkPolicy": {"clients": [{"app": "my-application"}]}}, "/networkPolicy/clients"),
        ({"networkPolicy": {"egress": [{"port": 6379}]}}, "/networkPolicy/egress"),
        ({"nodeSelector": {"gpu": True}}, "/nodeSelector"),
        ({"podAnnotations": {"version": 3}}, "/podAnnotations"),
        ({"service": {"annotations": {"internal": True}}}, "/service/annotations"),
        ({"topologyKeys": ["a zone"]}, "/topologyKeys"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)  # fmt: skip
def test_bad_values_are_refused_with_their_name(values: dict[str, Any], why: str) -> None:
    with pytest.raises(HelmError, match=re.escape(why)):
        list(objects(values))


def test_engines_are_placed_as_the_terraform_example_taints_its_nodes(made: list[dict[str, Any]]) -> None:
    taints = {
        (unquoted(taint["key"]), EFFECTS[unquoted(taint["effect"])])
        for name, group in node_groups().items()
        if name == "gpu"
        for taint in group["taints"].values()
    }
    assert taints
    for pod in pods(made):
        spec = pod["spec"]
        if any("nvidia.com/gpu" in each["resources"]["limits"] for each in containers(pod)):
            tolerated = {(each["key"], each["effect"]) for each in spec["tolerations"] if each["operator"] == "Exists"}
            assert taints <= tolerated
        for constraint in spec.get("topologySpreadConstraints", ()):
            assert constraint["whenUnsatisfiable"] == "ScheduleAnyway", "one zone must not keep a replica from starting"


def test_a_job_runs_where_the_engine_runs() -> None:
    given = {**VARIANTS["job"], "image": {"pullSecrets": ["registry"]}, "nodeSelector": {"pool": "gpu"}}
    made = list(objects(given))
    engine, job = (pod["spec"] for pod in pods(made))
    for place in ("imagePullSecrets", "nodeSelector", "tolerations"):
        assert job[place] == engine[place]
    (rule,) = job["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert rule["topologyKey"] == "kubernetes.io/hostname"
    labels = of_kind(made, "StatefulSet")[0]["spec"]["template"]["metadata"]["labels"]
    assert rule["labelSelector"]["matchLabels"].items() <= labels.items()


def test_secrets_are_variables_that_the_server_reads() -> None:
    secret = {"secret": "one"}
    given = {
        "model": {"source": "hub", "hub": {"name": "org/model", "token": secret}},
        "tiers": {"disk": {"key": secret}, "shared": {"url": "redis://redis:6379/0", "password": secret}},
    }
    (engine,) = of_kind(list(objects(given)), "StatefulSet")
    names = {each["name"] for each in engine["spec"]["template"]["spec"]["containers"][0]["env"]}
    code = "".join((CORE_PACKAGE / name).read_text(encoding="utf-8") for name in VARIABLES_OF)
    read = {*re.findall(r'^\w+_ENV = "(\w+)"', code, re.MULTILINE), "HF_TOKEN"}
    assert len(names) == 4
    assert names <= read, "HF_TOKEN is the variable of huggingface_hub"


def test_autoscalers_ask_for_series_of_the_engine_in_their_namespace() -> None:
    (scaler,) = of_kind(list(objects(values_of("three-replicas"))), "ScaledObject")
    queries = [each["metadata"]["query"] for each in scaler["spec"]["triggers"]]
    series = [re.findall(r"(vllm:\w+){([^}]*)}", query) for query in queries]
    assert [name for ((name, _),) in series] == [
        "vllm:num_requests_waiting",
        "vllm:time_to_first_token_seconds_bucket",
    ]
    assert all("namespace=" in labels and "pod=~" in labels for ((_, labels),) in series)
    (hpa,) = of_kind(list(objects(VARIANTS["hpa"])), "HorizontalPodAutoscaler")
    assert hpa["spec"]["metrics"][0]["pods"]["metric"]["name"] == "vllm_num_requests_waiting"


def test_a_network_policy_opens_the_port_of_requests_and_dns() -> None:
    made = list(objects(values_of("three-replicas")))
    (policy,), (pod,) = of_kind(made, "NetworkPolicy"), pods(of_kind(made, "StatefulSet"))
    ports = {each["name"]: each["containerPort"] for each in pod["spec"]["containers"][0]["ports"]}
    assert [each["port"] for rule in policy["spec"]["ingress"] for each in rule["ports"]] == [ports["http"]]
    dns = policy["spec"]["egress"][0]["ports"]
    assert [(each["port"], each["protocol"]) for each in dns] == [(53, "UDP"), (53, "TCP")]


def test_weights_outlive_the_release() -> None:
    (claim,) = of_kind(list(objects(values_of("one-gpu"))), "PersistentVolumeClaim")
    assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"


def test_terraform_encrypts_disks_that_hold_the_images_and_closes_the_api() -> None:
    (storage_class,) = (
        each['"kubernetes_storage_class_v1"'].popitem()[1]
        for each in terraform(TERRAFORM / "storage.tf")["resource"]
        if '"kubernetes_storage_class_v1"' in each
    )
    assert re.search(r"encrypted\W+true", str(storage_class["parameters"]))
    assert unquoted(storage_class["reclaim_policy"]) == "Retain"
    assert number(variables()["node_disk_gib"]) >= IMAGE_GIB
    disk = node_groups()["gpu"]["block_device_mappings"]["root"]["ebs"]
    assert (disk["encrypted"], disk["volume_size"]) == (True, "${var.node_disk_gib}")
    (endpoint,) = (
        each['"endpoint_cidrs"']
        for each in terraform(TERRAFORM / "variables.tf")["variable"]
        if '"endpoint_cidrs"' in each
    )
    assert "default" not in endpoint
    assert "0.0.0.0/0" in endpoint["validation"][0]["condition"]
    cluster = eks()
    assert cluster["cluster_endpoint_public_access_cidrs"] == "${var.endpoint_cidrs}"
    assert cluster["cluster_endpoint_public_access"] == "${length(var.endpoint_cidrs) > 0}"


def eks() -> dict[str, Any]:
    """Return the arguments of the Terraform example's cluster."""
    (found,) = (each['"eks"'] for each in terraform(TERRAFORM / "main.tf")["module"] if '"eks"' in each)
    return dict(found)


def node_groups() -> dict[str, Any]:
    return dict(eks()["eks_managed_node_groups"])


def terraform(path: Path) -> dict[str, Any]:
    with path.open(encoding="utf-8") as file:
        found: dict[str, Any] = hcl2.load(file)
    return {name: value for name, value in found.items() if name != "__comments__"}


def variables() -> dict[str, Any]:
    """Return the defaults of the Terraform example's variables."""
    return {
        unquoted(name): facts.get("default")
        for each in terraform(TERRAFORM / "variables.tf")["variable"]
        for name, facts in each.items()
    }


def unquoted(text: str) -> str:
    return text.strip('"')


def number(value: object) -> int:
    return int(str(value))
