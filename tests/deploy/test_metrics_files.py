"""The dashboard and the alerts use only metrics that exist; Prometheus itself reads our metrics, rules and config."""

import json
import re
import shutil
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from node.monitor.metrics import exposition
from node.monitor.observations import Observations
from node.status.schema import (
    NodeStatus,
    OwnStatus,
    RelayStatus,
    WorkerStatus,
)
from scenarios.harness.made_up_swarm import made_up_status
from swarm.protocol.transfer.allowance import AllowanceStatus

DEPLOY = Path(__file__).parents[2] / "deploy"
NODE = NodeStatus(
    head=(0, 5),
    nodes=[OwnStatus(slot=3, standing="fresh", held=(0, 5), engine=(0, 5), tokens_s=7.5, engine_restarts=1,
                     engine_reloads=0, uplink_today=AllowanceStatus(limit_bytes=9), work=WorkerStatus())],
)  # fmt: skip


def exported() -> set[str]:
    """The names of all samples that some process exports."""
    names: set[str] = set()
    for status in (made_up_status(20, 701.0), NODE, RelayStatus(nodes=[OwnStatus(slot=2)])):
        text = exposition(status, Observations(), "0")[0].decode()
        names |= {re.split(r"[{ ]", line)[0] for line in text.splitlines() if not line.startswith("#")}
    return names


def used(expression: str) -> set[str]:
    return set(re.findall(r"\bswarm_[a-z_]+", expression))


def expressions() -> list[str]:
    board: dict[str, Any] = json.loads((DEPLOY / "grafana" / "swarm-node.json").read_text())
    found = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    found += [variable["query"] for variable in board["templating"]["list"] if variable["type"] == "query"]
    return found + re.findall(r"expr: (.*)", (DEPLOY / "prometheus" / "alerts.yml").read_text())


@pytest.mark.parametrize("expression", expressions())
def test_each_metric_that_is_asked_for_is_exported(expression: str):
    assert used(expression) or expression.startswith("up{")
    assert used(expression) <= exported()


def test_panels_lie_beside_one_another():
    board = json.loads((DEPLOY / "grafana" / "swarm-node.json").read_text())
    cells = [
        (x, y)
        for panel in board["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


def tool(name: str) -> str:
    found = shutil.which(name)
    assert found, f"needs {name}: apt-get install prometheus"
    return found


@pytest.mark.slow
def test_promtool_accepts_the_rules_the_config_and_the_metrics(tmp_path: Path):
    subprocess.run([tool("promtool"), "check", "rules", DEPLOY / "prometheus" / "alerts.yml"], check=True)
    subprocess.run([tool("promtool"), "check", "config", DEPLOY / "prometheus" / "prometheus.yml"], check=True)
    text = exposition(made_up_status(20, 701.0), Observations(), "0", accept="")[0]
    checked = subprocess.run([tool("promtool"), "check", "metrics"], input=text, capture_output=True, check=False)
    assert b"error" not in checked.stderr.lower()


@pytest.mark.slow
def test_a_prometheus_scrapes_a_process_and_answers_every_panel(tmp_path: Path):
    serve = [sys.executable, "-m", "scenarios.bench.monitor", "--serve", "20"]
    with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as monitor:
        assert monitor.stdout is not None
        url = next(line.strip() for line in monitor.stdout if line.startswith("http"))
        target = url.removeprefix("http://").rstrip("/")
        (tmp_path / "prometheus.yml").write_text(
            "global: {scrape_interval: 1s, scrape_timeout: 1s}\n"
            f"scrape_configs: [{{job_name: swarm-seed, static_configs: [{{targets: ['{target}']}}]}}]\n"
        )
        command = [tool("prometheus"), f"--config.file={tmp_path}/prometheus.yml",
                   f"--storage.tsdb.path={tmp_path}/data", "--web.listen-address=127.0.0.1:19464",
                   "--log.level=error"]  # fmt: skip
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as prometheus:
            try:
                assert _value("up", until=lambda rows: rows and rows[0]["value"][1] == "1")
                assert _value("swarm_members")[0]["metric"]["job"] == "swarm-seed"
                assert sum(float(row["value"][1]) for row in _value("swarm_members")) == 20
                for expression in expressions():
                    _value(expression.replace('job=~"$job"', 'job=~".+"'), until=lambda rows: True)
            finally:
                prometheus.terminate()
                monitor.terminate()


def _value(expression: str, until: Any = bool) -> list[dict[str, Any]]:
    """What Prometheus answers to an instant query, once it is as wanted."""
    if expression.startswith("label_values"):
        return []
    query = "http://127.0.0.1:19464/api/v1/query?" + urllib.parse.urlencode({"query": expression})
    end = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(query, timeout=5) as answer:
                found = json.load(answer)
            assert found["status"] == "success"
            if until(rows := found["data"]["result"]):
                return rows
        except OSError:
            pass
        assert time.monotonic() < end, f"{expression} had no answer"
        time.sleep(0.3)
