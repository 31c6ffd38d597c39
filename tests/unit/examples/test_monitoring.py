"""The board and the rules ask for series that are there, and the rules do what their own tests say."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from typing import Any

import pytest
import yaml

from ragcache_core.stats import CHUNK_SERIES, ENGINE_SERIES, TIER_SERIES
from tests.conftest import ROOT

MONITORING = ROOT / "examples" / "monitoring"
OURS = {shown.name for table in (ENGINE_SERIES, TIER_SERIES, CHUNK_SERIES) for shown in table.values()}


def read(name: str) -> Any:
    text = (MONITORING / name).read_text(encoding="utf-8")
    return json.loads(text) if name.endswith(".json") else yaml.safe_load(text)


def expressions() -> list[str]:
    rules = [rule["expr"] for group in read("ragcache-rules.yml")["groups"] for rule in group["rules"]]
    board = [
        target["expr"] for panel in read("ragcache-dashboard.json")["panels"] for target in panel.get("targets", [])
    ]
    assert len(rules) > 10
    assert len(board) > 20
    return rules + board


def test_every_series_of_ours_that_is_asked_for_is_there() -> None:
    """Of vLLM's, ``tests/vllm_facts`` says so for each release."""
    named = {name for text in expressions() for name in re.findall(r"\bragcache_\w+", text)}
    assert {re.sub("_total$", "", name) for name in named} - OURS == set()
    rules = read("ragcache-rules.yml")["groups"][0]["rules"]
    recorded = {name for text in expressions() for name in re.findall(r"\bragcache:[\w:]+", text)}
    assert recorded <= {rule["record"] for rule in rules if "record" in rule}


def test_every_count_of_faults_has_a_panel_and_an_alert() -> None:
    rules = read("ragcache-rules.yml")["groups"][0]["rules"]
    alerts = " ".join(rule["expr"] for rule in rules if "alert" in rule)
    panels = " ".join(t["expr"] for p in read("ragcache-dashboard.json")["panels"] for t in p.get("targets", []))
    for name in ("shared_failures", "dropped_blocks", "corrupt_blocks", "lost_blocks"):
        assert f"ragcache_{name}_total" in alerts
        assert f"ragcache_{name}_total" in panels


def test_every_alert_is_tried_where_it_fires_and_named_with_what_to_do() -> None:
    alerts = {rule["alert"]: rule for rule in read("ragcache-rules.yml")["groups"][0]["rules"] if "alert" in rule}
    tried = [case for test in read("ragcache-rules-test.yml")["tests"] for case in test["alert_rule_test"]]
    assert {case["alertname"] for case in tried if case["exp_alerts"]} == set(alerts)
    assert all({"summary", "description"} == set(rule["annotations"]) for rule in alerts.values())


def test_the_rules_do_what_their_tests_say() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed: it comes with Prometheus")
    for command in (["check", "config", "prometheus.yml"], ["test", "rules", "ragcache-rules-test.yml"]):
        done = subprocess.run([promtool, *command], cwd=MONITORING, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
