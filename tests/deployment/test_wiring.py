"""What the parts of the chart say of each other and of the image: folders, sizes, addresses, peers, and queries.

Each check fails for a template that is still valid for Kubernetes, but makes engines that do not start, do not last,
are not found, or are open to others.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deployment.chart import (
    DEPLOYMENT,
    EVERY,
    NAME,
    containers,
    mib,
    objects,
    of_kind,
    pods,
    size_gib,
    values_of,
    whole,
)

DOCKERFILE = (DEPLOYMENT / "Dockerfile").read_text(encoding="utf-8")


def engine_of(made: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the engine's pod and its first container."""
    (pod,) = pods(of_kind(made, "StatefulSet"))
    return pod["spec"], pod["spec"]["containers"][0]


def mounts(container: dict[str, Any]) -> dict[str, str]:
    """Return by volume where a container has it."""
    return {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}


def test_pods_run_as_the_images_user_and_write_the_images_volume(made: list[dict[str, Any]]) -> None:
    (user,) = re.findall(r"^USER (\d+)", DOCKERFILE, re.MULTILINE)
    (volume,) = re.findall(r"^VOLUME (\S+)", DOCKERFILE, re.MULTILINE)
    for pod in pods(made):
        security = pod["spec"]["securityContext"]
        assert {str(security[name]) for name in ("runAsUser", "runAsGroup", "fsGroup")} == {user}
    _, engine = engine_of(made)
    assert mounts(engine)["cache"] == volume
    arguments = engine["args"]
    if "--cache-dir" in arguments:
        assert arguments[arguments.index("--cache-dir") + 1].startswith(volume + "/")


def test_a_liveness_probe_forgives_a_busy_machine(made: list[dict[str, Any]]) -> None:
    _, engine = engine_of(made)
    live = engine["livenessProbe"]
    assert live["periodSeconds"] * live["failureThreshold"] >= 30
    assert live["timeoutSeconds"] >= 5


@pytest.mark.parametrize("name", EVERY)
def test_sizes_are_those_of_the_values(name: str) -> None:
    values, made = whole(EVERY[name]), list(objects(EVERY[name]))
    pod, engine = engine_of(made)
    arguments, tiers = engine["args"], values["tiers"]
    assert size_gib("--host-bytes", arguments) == tiers["hostGiB"]
    assert size_gib("--disk-bytes", arguments) == tiers["disk"]["GiB"]
    assert ("--shared" in arguments) is bool(tiers["shared"]["url"])
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    shm = volumes["shm"]["emptyDir"]
    assert shm["medium"] == "Memory"
    assert mib(shm["sizeLimit"]) == values["engine"]["shmGiB"] * 1024
    assert mounts(engine)["shm"] == "/dev/shm"
    (claim,) = of_kind(made, "StatefulSet")[0]["spec"]["volumeClaimTemplates"]
    wanted_gib = tiers["disk"]["GiB"] * 1.05 + tiers["compiledGiB"]
    assert mib(claim["spec"]["resources"]["requests"]["storage"]) >= wanted_gib * 1024
    gpus = values["engine"]["gpus"]
    assert engine["resources"]["limits"].get("nvidia.com/gpu", 0) == gpus
    if gpus > 1:
        assert arguments[arguments.index("--tensor-parallel-size") + 1] == str(gpus)
        assert mib(shm["sizeLimit"]) >= 160 + 240 * gpus, "what vLLM's queues need"


def test_no_secret_is_optional_and_files_of_secrets_are_where_the_server_reads_them(made: list[dict[str, Any]]) -> None:
    for pod in pods(made):
        assert "optional" not in str(pod)
    pod, engine = engine_of(made)
    arguments = engine["args"]
    if "--tenants" in arguments:
        folder = mounts(engine)["tenants"]
        assert str(Path(arguments[arguments.index("--tenants") + 1]).parent) == folder
        (mount,) = (each for each in engine["volumeMounts"] if each["name"] == "tenants")
        assert "subPath" not in mount, "a secret that is changed would not reach the server"


def test_services_reach_the_port_of_requests_and_one_has_each_replicas_address(made: list[dict[str, Any]]) -> None:
    (engine_set,) = of_kind(made, "StatefulSet")
    _, engine = engine_of(made)
    ports = {port["name"]: port["containerPort"] for port in engine["ports"]}
    services = {each["metadata"]["name"]: each["spec"] for each in of_kind(made, "Service")}
    assert {ports[spec["ports"][0]["targetPort"]] for spec in services.values()} == {8000}
    assert services[engine_set["spec"]["serviceName"]]["clusterIP"] == "None"
    assert services[engine_set["spec"]["serviceName"]]["ports"][0]["port"] == 8000, "as Fleet.connect is told"
    assert "clusterIP" not in services[NAME]
    assert engine_set["spec"]["podManagementPolicy"] == "Parallel", "one that is not ready keeps no other from starting"
    for monitor in of_kind(made, "ServiceMonitor"):
        (endpoint,) = monitor["spec"]["endpoints"]
        assert endpoint["path"] == "/metrics"


@pytest.mark.parametrize("name", EVERY)
def test_the_disruption_budget_and_the_scaler_have_the_values_bounds(name: str) -> None:
    values, made = whole(EVERY[name]), list(objects(EVERY[name]))
    (budget,) = of_kind(made, "PodDisruptionBudget")
    assert budget["spec"]["maxUnavailable"] == values["podDisruptionBudget"]["maxUnavailable"] == 1
    scaling = values["autoscaling"]
    for scaler in of_kind(made, "ScaledObject"):
        spec = scaler["spec"]
        assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (scaling["min"], scaling["max"])
        assert spec["cooldownPeriod"] == scaling["scaleDownSeconds"]
        behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        thresholds = [each["metadata"].get("threshold") for each in spec["triggers"]]
        assert thresholds[:2] == [str(scaling["waitingRequests"]), str(scaling["ttftSeconds"])]
        assert_scales_down_late(behavior, scaling["scaleDownSeconds"])
        if scaling["workingHours"]["start"]:
            (cron,) = (each["metadata"] for each in spec["triggers"] if each["type"] == "cron")
            assert {name: cron[name] for name in ("timezone", "start", "end")} == scaling["workingHours"]
            assert cron["desiredReplicas"] == "1"
    for scaler in of_kind(made, "HorizontalPodAutoscaler"):
        spec = scaler["spec"]
        assert (spec["minReplicas"], spec["maxReplicas"]) == (scaling["min"], scaling["max"])
        assert_scales_down_late(spec["behavior"], scaling["scaleDownSeconds"])


def assert_scales_down_late(behavior: dict[str, Any], wait_s: int) -> None:
    down = behavior["scaleDown"]
    assert down["stabilizationWindowSeconds"] == wait_s >= 600, "what a removed replica had in host memory is lost"
    assert [(policy["type"], policy["value"]) for policy in down["policies"]] == [("Pods", 1)]


@pytest.mark.parametrize("name", [name for name in EVERY if whole(EVERY[name])["networkPolicy"]["enabled"]])
def test_a_network_policy_lets_in_and_out_what_the_values_name_and_no_more(name: str) -> None:
    values, made = whole(EVERY[name]), list(objects(EVERY[name]))
    (policy,) = of_kind(made, "NetworkPolicy")
    given = values["networkPolicy"]
    (ingress,) = policy["spec"]["ingress"]
    wanted = [{"podSelector": each} for each in given["clients"] or [{}]]
    if values["warm"]["mode"] == "job":
        (job,) = of_kind(made, "Job")
        wanted.append({"podSelector": {"matchLabels": job["spec"]["template"]["metadata"]["labels"]}})
    wanted += [{"namespaceSelector": each} for each in given["monitoring"]]
    assert ingress["from"] == wanted
    hub = [{"ports": [{"port": 443}]}] if values["model"]["source"] == "hub" else []
    assert policy["spec"]["egress"][1:] == hub + given["egress"]
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]


def test_what_warms_waits_for_the_engine_and_a_sidecar_says_when_it_has(made: list[dict[str, Any]]) -> None:
    for pod in pods(made):
        for container in containers(pod):
            if container["name"] == "loader":
                (mount,) = (each for each in container["volumeMounts"] if each["name"] == "models")
                assert not mount.get("readOnly"), "it fills the folder"
            if container["name"] != "warm":
                continue
            command = container["command"][-1]
            assert " --wait-ready" in command
            if probe := container.get("readinessProbe"):
                assert f"touch {probe['exec']['command'][-1]} " in command
                assert "http://127.0.0.1:8000 " in command
    for job in of_kind(made, "Job"):
        assert job["metadata"]["annotations"]["helm.sh/hook"] == "post-install,post-upgrade"
        (service,) = (each for each in of_kind(made, "Service") if each["metadata"]["name"] == NAME)
        (container,) = job["spec"]["template"]["spec"]["containers"]
        assert f"http://{NAME}:{service['spec']['ports'][0]['port']} " in container["command"][-1]


SERIES = """\
rule_files: []
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - {series: 'vllm:num_requests_waiting{namespace="NAMESPACE", pod="engine-0"}', values: '4x20'}
      - {series: 'vllm:num_requests_waiting{namespace="NAMESPACE", pod="engine-1"}', values: '20x20'}
      - {series: 'vllm:num_requests_waiting{namespace="NAMESPACE", pod="engine-two-0"}', values: '400x20'}
      - {series: 'vllm:num_requests_waiting{namespace="of-others", pod="engine-0"}', values: '400x20'}
"""
"""Two replicas, one of another release, and one of another namespace."""
BUCKETS = {"engine-0": 0.5, "engine-1": 4.0, "engine-two-0": 9.0}
"""The upper limit in seconds of the bucket that all requests of a pod end in."""


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_keda_asks_prometheus_for_all_that_waits_and_for_the_slowest_replica(tmp_path: Path) -> None:
    (scaler,) = of_kind(list(objects(values_of("three-replicas"))), "ScaledObject")
    waiting, ttft = (each["metadata"]["query"] for each in scaler["spec"]["triggers"])
    (namespace,) = {*re.findall(r'namespace="([\w-]+)"', waiting + ttft)}
    test = yaml.safe_load(SERIES.replace("NAMESPACE", namespace))
    for pod, bucket_s in BUCKETS.items():
        for le in (*BUCKETS.values(), "+Inf"):
            ends = "0+60x20" if float(le) >= bucket_s else "0+0x20"
            labels = f'namespace="{namespace}", pod="{pod}", le="{le}"'
            series = f"vllm:time_to_first_token_seconds_bucket{{{labels}}}"
            test["tests"][0]["input_series"].append({"series": series, "values": ends})
    slowest_s = 0.5 + 0.95 * (4.0 - 0.5)  # linear within its bucket
    test["tests"][0]["promql_expr_test"] = [
        {"expr": waiting, "eval_time": "10m", "exp_samples": [{"labels": "{}", "value": 24}]},
        {"expr": ttft, "eval_time": "10m", "exp_samples": [{"labels": "{}", "value": slowest_s}]},
    ]
    path = tmp_path / "queries.yml"
    path.write_text(yaml.safe_dump(test), encoding="utf-8")
    done = subprocess.run(["promtool", "test", "rules", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [each["metricType"] for each in scaler["spec"]["triggers"]] == ["AverageValue", "Value"], (
        "requests are shared by the replicas, a time is not"
    )
