"""Prometheus' rules and the dashboard: valid, each alert tested, each query answered by a cluster under load."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import yaml

from tests.e2e.cluster import LiveCluster, running_cluster
from tests.free_ports import free_port

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana/tanghulu.json").read_text())
DEADLINE_S = 120.0
FLAGS = ("--engine", "mock", "--model", "mock", "--debug", "mock_speedup=50", "--nodes", "2", "--prefill", "2")


def _tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"extra: {name} is not here; apt-get install prometheus")
    return found


def _promtool(*arguments: str) -> None:
    done = subprocess.run(
        [_tool("promtool"), *arguments], capture_output=True, text=True, timeout=60, cwd=DEPLOY / "prometheus"
    )
    assert done.returncode == 0, done.stdout + done.stderr


def _rules() -> list[dict[str, str]]:
    groups = yaml.safe_load((DEPLOY / "prometheus/rules.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def queries() -> list[str]:
    """Every query of the dashboard."""
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]


def test_rules_and_alerts():
    _promtool("check", "config", "prometheus.yml")
    _promtool("test", "rules", "tests.yml")


def test_every_alert_has_a_case_in_which_it_fires():
    tests = yaml.safe_load((DEPLOY / "prometheus/tests.yml").read_text())["tests"]
    fired = {each["alertname"] for test in tests for each in test["alert_rule_test"] if each.get("exp_alerts")}
    assert fired == {rule["alert"] for rule in _rules() if "alert" in rule}


def test_no_label_of_ours_is_renamed_for_one_of_the_target():
    rows = (DEPLOY.parent / "docs/reference/metrics.md").read_text()
    labels = re.findall(r"^\| `tanghulu_\w+` \| \w+ \| ([^|]*) \|", rows, re.MULTILINE)
    assert "worker_role" in labels
    assert not {"role", "job", "instance"} & set(re.findall(r"\w+", " ".join(labels)))


def test_panels_have_places_and_queries_of_their_own():
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [(each["gridPos"]["x"], each["gridPos"]["y"]) for each in panels]
    assert len(set(places)) == len(places)
    assert len(set(queries())) == len(queries())


@pytest.fixture(scope="module")
def loaded_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    _tool("prometheus")
    with running_cluster(tmp_path_factory.mktemp("monitored"), *FLAGS) as live:
        yield live


@contextlib.contextmanager
def _prometheus(cluster: LiveCluster, folder: Path) -> Iterator[str]:
    """A real Prometheus with the rules of deploy/, which scrapes every process of ``cluster``."""
    scraped = [{"targets": [each["metrics_address"]], "labels": {"role": each["role"]}} for each in cluster.entries()]
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(DEPLOY / "prometheus/rules.yml")],
        "scrape_configs": [{"job_name": "tanghulu", "static_configs": scraped}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    url = f"127.0.0.1:{free_port()}"
    command = [_tool("prometheus"), f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, f"--web.listen-address={url}"], stdout=log, stderr=log, env=os.environ | {"GOMAXPROCS": "1"}
        )
    try:
        yield f"http://{url}"
    finally:
        process.terminate()
        process.wait(30)


def _load(cluster: LiveCluster) -> None:
    def ask(number: int) -> None:
        body = {"prompt": f"{'the same beginning ' * 120}{number % 4}", "max_tokens": 8, "stream": False}
        cluster.http.post(f"{cluster.url}/v1/completions", json=body).raise_for_status()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(ask, range(40)))


@pytest.mark.slow
def test_every_query_has_data_from_a_cluster_under_load(loaded_cluster, tmp_path):
    with _prometheus(loaded_cluster, tmp_path) as url, httpx.Client(base_url=url, trust_env=False) as http:

        def answers(query: str) -> list[object]:
            with contextlib.suppress(httpx.HTTPError, KeyError):
                return http.get("/api/v1/query", params={"query": query}).json()["data"]["result"]
            return []

        def silent() -> list[str]:
            # Rates need growth between two looks: the load goes on until each query has seen some.
            _load(loaded_cluster)
            recorded = [rule["record"] for rule in _rules() if "record" in rule]
            wanted = [re.sub(r"\$__rate_interval", "30s", query) for query in queries()] + recorded
            return [query for query in wanted if not answers(query)]

        until_s = time.monotonic() + DEADLINE_S
        while left := silent():
            assert time.monotonic() < until_s, f"no data for {left}"
        alerts = http.get("/api/v1/rules", params={"type": "alert"}).json()["data"]["groups"]
        assert all(rule["health"] == "ok" for group in alerts for rule in group["rules"])


@pytest.mark.slow
def test_metric_names(loaded_cluster):
    documented = set(
        re.findall(r"^\| `(\w+)`", (DEPLOY.parent / "docs/reference/metrics.md").read_text(), re.MULTILINE)
    )
    for entry in loaded_cluster.entries():
        page = loaded_cluster.http.get(f"http://{entry['metrics_address']}/metrics").text
        done = subprocess.run(
            [_tool("promtool"), "check", "metrics"], input=page, capture_output=True, text=True, timeout=60
        )
        ours = [line for line in done.stderr.splitlines() if line.startswith("tanghulu_")]
        assert ours == [], entry["role"]
        shown = set(re.findall(r"^# TYPE (tanghulu_\w+)", page, re.MULTILINE))
        assert shown <= documented, "docs/reference/metrics.md is stale: python tools/reference.py --metrics"
