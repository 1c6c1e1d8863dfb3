"""What the operator sees in Prometheus: a real Prometheus scrapes a real coordinator, and takes every alert and every panel."""

import json
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.system.local_swarm import LocalSwarm, toml_of_run, wait_for
from tests.waiting import free_port

pytestmark = [pytest.mark.system, pytest.mark.interop, pytest.mark.timeout(900)]

DEPLOYED = Path(__file__).resolve().parents[2] / "deploy" / "monitoring"
RUN = toml_of_run("watched", source="DATA", clock={"batch_samples": 8, "min_peers": 1, "snapshot_every": 20})
EMPTY_HERE = ("joins_refused", "refused_total", "resyncs_total", "5m])", "1h])")
"""What a young swarm without trouble has no rows for, or no rate of yet."""


@pytest.fixture(scope="module")
def programs() -> tuple[str, str]:
    found = shutil.which("prometheus"), shutil.which("promtool")
    if None in found:
        pytest.skip("no prometheus here: apt-get install prometheus")
    return found  # type: ignore[return-value]


class Watched(LocalSwarm):
    """A swarm whose coordinator has metrics."""

    def __init__(self, folder: Path) -> None:
        self.metrics = f"127.0.0.1:{free_port()}"
        text = folder / "text.txt"
        text.write_bytes(Path(json.__file__).read_bytes())
        super().__init__(folder, RUN.replace("DATA", str(text)))

    def surroundings(self, name: str) -> dict[str, str]:
        return {"SWARMENTUM_COORDINATOR_METRICS_LISTEN": self.metrics} if name == "coordinator" else {}


@pytest.fixture(scope="module")
def ask(programs: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Any]]:
    """Asks a Prometheus that scrapes a swarm of one peer each second."""
    folder = tmp_path_factory.mktemp("watched")
    swarm = Watched(folder)
    listen = f"127.0.0.1:{free_port()}"
    for file in DEPLOYED.glob("*.yml"):
        text = file.read_text().replace("127.0.0.1:9100", swarm.metrics).replace("interval: 15s", "interval: 1s")
        (folder / file.name).write_text(text)
    flags = (
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address={listen}",
    )
    log = (folder / "prometheus.log").open("w")
    with log, subprocess.Popen([programs[0], *flags], stdout=log, stderr=subprocess.STDOUT) as prometheus:

        def get(path: str) -> Any:
            with urllib.request.urlopen(f"http://{listen}/api/v1/{path}", timeout=300) as answer:
                return json.load(answer)["data"]

        try:
            swarm.join("ada")
            swarm.wait_step("ada", 25)

            def seen() -> bool:
                try:
                    found = get("query?query=swarmentum_head_step")["result"]
                except OSError:
                    return False
                return bool(found) and int(found[0]["value"][1]) >= 20

            wait_for("the run in Prometheus", seen)
            yield get
        finally:
            prometheus.terminate()
            swarm.close()


def test_metrics_are_as_prometheus_wants_them(ask: Callable[[str], Any], programs: tuple[str, str]) -> None:
    target = ask("targets")["activeTargets"][0]["scrapeUrl"]
    text = urllib.request.urlopen(target, timeout=300).read()
    done = subprocess.run([programs[1], "check", "metrics"], input=text, capture_output=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr.decode()


def test_every_panel_has_a_query_that_works(ask: Callable[[str], Any]) -> None:
    dashboard = json.loads((DEPLOYED / "grafana-dashboard.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(queries) > 20
    silent = {query for query in queries if not any(part in query for part in EMPTY_HERE)}

    def answered() -> bool:
        """A coordinator that stood still for a moment has no figures of now: they come with the next scrape."""
        for query in queries:
            if ask("query?" + urllib.parse.urlencode({"query": query.replace("$run", ".*")}))["result"]:
                silent.discard(query)
        return not silent

    with suppress(AssertionError):
        wait_for("data for every query", answered)
    assert not silent, "no data for these queries: a metric has another name or other labels"
    [name] = ask("query?query=swarmentum_run_info")["result"]
    assert name["metric"]["name"] == "watched"


def test_every_rule_loads_works_and_is_quiet_in_a_healthy_swarm(
    ask: Callable[[str], Any], programs: tuple[str, str]
) -> None:
    def groups() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = ask("rules")["groups"]
        return found if found and all(rule["health"] != "unknown" for rule in found[0]["rules"]) else []

    [group] = wait_for("evaluated rules", groups)
    assert [rule["name"] for rule in group["rules"] if rule["health"] != "ok"] == []
    assert [rule["name"] for rule in group["rules"] if rule["state"] == "firing"] == []


CASES = """
rule_files: [RULES]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - {series: 'swarmentum_head_step{instance="c", run="r"}', values: '7x60'}
      - {series: 'swarmentum_run_phase{instance="c", run="r", phase="open"}', values: '1x60'}
      - {series: 'swarmentum_loss_nats{instance="c", run="r"}', values: 'NANS'}
      - {series: 'swarmentum_peers{instance="c", run="r", phase="ready"}', values: '3x60'}
      - {series: 'swarmentum_peers_needed{instance="c", run="r"}', values: '3x60'}
      - {series: 'swarmentum_disk_free_bytes{instance="c"}', values: '1000000000x60'}
      - {series: 'up{instance="c", job="swarmentum"}', values: '0x60'}
    alert_rule_test:
      - {eval_time: 50m, alertname: RunWaits, exp_alerts: []}
    promql_expr_test:
      - expr: count by (alertname) (ALERTS{alertstate="firing"})
        eval_time: 50m
        exp_samples:
          - {labels: '{alertname="CoordinatorDown"}', value: 1}
          - {labels: '{alertname="RunStandsStill"}', value: 1}
          - {labels: '{alertname="LossIsNoNumber"}', value: 1}
          - {labels: '{alertname="FewPeers"}', value: 1}
          - {labels: '{alertname="DiskFillsUp"}', value: 1}
"""


def test_rules_fire_when_a_run_is_in_trouble(programs: tuple[str, str], tmp_path: Path) -> None:
    """Prometheus' own tester plays an hour in which a run stands still with a loss of NaN and too few peers."""
    cases = tmp_path / "cases.yml"
    nans = " ".join(["NaN"] * 61)  # its short form takes numbers only
    cases.write_text(CASES.replace("RULES", str(DEPLOYED / "alerts.yml")).replace("NANS", nans))
    done = subprocess.run(
        [programs[1], "test", "rules", str(cases)], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
