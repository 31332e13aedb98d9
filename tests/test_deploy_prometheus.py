"""What Prometheus and Grafana are given: names that exist, alerts that fire and resolve, panels that show something."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvd.observe.families import FAMILIES, LAG
from kvd.testing.cluster import LocalCluster, wait_until

ROOT = Path(__file__).parents[1]
PROMETHEUS = ROOT / "deploy" / "prometheus"
DASHBOARD = ROOT / "deploy" / "grafana" / "kvd.json"
OPERATIONS = ROOT / "docs" / "operations.md"
DEADLINE_S = 100.0


def tool(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed; `apt-get install prometheus` (Debian, Ubuntu) brings it")
    return path


def panels() -> list[str]:
    return [target["expr"] for panel in json.loads(DASHBOARD.read_text())["panels"] for target in panel["targets"]]


def alerts() -> list[str]:
    return re.findall(r"- alert: (\w+)", (PROMETHEUS / "rules.yml").read_text())


def test_alerts_panels_and_the_guide_use_metrics_that_exist() -> None:
    names = {family.name for family in FAMILIES} | {f"{LAG}_bucket"}
    rules = (PROMETHEUS / "rules.yml").read_text()
    used = set(re.findall(r"\bkvd_[a-z_]+", "\n".join(panels()) + rules)) - {"kvd_job"}
    assert used <= names
    assert len(panels()) == 10
    assert len(alerts()) == 8
    guide = OPERATIONS.read_text()
    assert set(re.findall(r"`(Kvd\w+)`", guide)) == set(alerts())
    listed = {
        name
        for row in re.findall(r"^\| (`kvd_\w+`) \|", guide, re.MULTILINE)
        for name in re.findall(r"kvd_[a-z_]+", row)
    }
    assert listed - {"kvd_job"} == {family.name for family in FAMILIES} | {LAG}


@pytest.mark.parametrize(
    "command", ["check config prometheus.yml", "check rules rules.yml", "test rules rules.test.yml"]
)
def test_promtool_has_no_complaint(command: str) -> None:
    run = subprocess.run(
        [tool("promtool"), *command.split()], cwd=PROMETHEUS, capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    if command.startswith("test"):
        cases = (PROMETHEUS / "rules.test.yml").read_text()
        fires, quiet = cases.split("  - interval: 1m")[1:]
        assert set(re.findall(r"alertname: (\w+)", fires)) == set(alerts())
        assert set(re.findall(r"alertname: (\w+)", quiet)) == set(alerts())


class Prometheus:
    """A real one, which reads its targets from a file."""

    def __init__(self, folder: Path, url: str) -> None:
        self._targets = folder / "targets.json"
        self._url = url

    def scrape(self, urls: list[str]) -> None:
        places = [urllib.parse.urlsplit(url).netloc for url in urls]
        new = self._targets.with_suffix(".new")
        new.write_text(json.dumps([{"targets": places}]))
        new.replace(self._targets.with_name("targets.json"))

    def ask(self, path: str, **query: str) -> Any:
        with urllib.request.urlopen(f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(query)}", timeout=60) as answer:
            return json.load(answer)["data"]

    def values(self, expression: str) -> list[str]:
        return [series["value"][1] for series in self.ask("query", query=expression)["result"]]

    def firing(self) -> set[str]:
        return {alert["labels"]["alertname"] for alert in self.ask("alerts")["alerts"] if alert["state"] == "firing"}


@contextmanager
def prometheus(folder: Path) -> Iterator[Prometheus]:
    """Scrapes and evaluates once a second; alerts that fire after a while fire after a second."""
    program = tool("prometheus")
    rules = re.sub(r"for: \d+m", "for: 1s", (PROMETHEUS / "rules.yml").read_text())
    (folder / "rules.yml").write_text(rules)
    (folder / "targets.json").write_text("[]")
    (folder / "prometheus.yml").write_text(
        "global: {scrape_interval: 1s, evaluation_interval: 1s}\n"
        "rule_files: [rules.yml]\n"
        "scrape_configs:\n"
        "  - job_name: kvd\n"
        "    file_sd_configs: [{files: [targets.json], refresh_interval: 1s}]\n"
    )
    log = folder / "log"
    with log.open("w") as stream:
        process = subprocess.Popen(
            [program, "--config.file=prometheus.yml", "--storage.tsdb.path=data", "--web.listen-address=127.0.0.1:0"],
            cwd=folder,
            stderr=stream,
            stdout=subprocess.DEVNULL,
            env={"PATH": os.environ["PATH"]},
        )
    try:
        found = wait_until(
            lambda: process.poll() is not None or re.search(r"address=(127\.0\.0\.1:[1-9]\d*)", log.read_text()),
            "Prometheus listens",
            DEADLINE_S,
        )
        assert process.poll() is None, log.read_text()
        yield Prometheus(folder, f"http://{found[1]}")
    finally:
        process.terminate()
        process.wait(DEADLINE_S)


def test_a_real_prometheus_follows_a_cluster_through_the_death_of_a_server(tmp_path: Path) -> None:
    tool("prometheus")
    over = threading.Event()
    with (
        LocalCluster(1, 2, processes=True, replicas=2, metrics_bind="127.0.0.1:0") as cluster,
        prometheus(tmp_path) as watcher,
    ):
        store = cluster.store()
        ones = np.ones(1024, np.float32)
        store.init(["a", "b", "c"], [ones] * 3)

        def train() -> None:
            outs = [np.empty_like(ones) for _ in range(3)]
            while not over.wait(0.02):
                store.pushpull(["a", "b", "c"], [ones] * 3, outs)

        training = threading.Thread(target=train)
        training.start()
        try:
            daemons = [cluster.scheduler, *cluster.servers]
            watcher.scrape([daemon.metrics_url for daemon in daemons])
            wait_until(lambda: watcher.values("sum(up)") == ["3"], "all three are scraped", DEADLINE_S)
            wait_until(lambda: all(watcher.values(panel) for panel in panels()), "each panel has a series", DEADLINE_S)
            [steps] = watcher.values("max(kvd_step)")
            assert float(steps) > 0
            assert not watcher.firing()

            cluster.kill_server(1)
            wait_until(lambda: {"KvdOneCopy", "KvdDown"} <= watcher.firing(), "the death is an alert", DEADLINE_S)
            assert watcher.values('sum(kvd_deaths_total{role="server"})') == ["1"]
            cluster.restart_server(1)
            watcher.scrape([daemon.metrics_url for daemon in (cluster.scheduler, *cluster.servers)])
            wait_until(lambda: not watcher.firing(), "the alerts are resolved", DEADLINE_S)
            assert watcher.values('kvd_partitions{copies="2"}') == ["2"]
        finally:
            over.set()
            training.join(DEADLINE_S)
