"""The alert rules and the dashboard: promtool accepts them, and they use only metrics that exist."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from holdfast import Holdfast
from holdfast.observe.counters import Counters, OutboxStats
from holdfast.observe.prometheus import MetricsCollector, QueueGauges, StoreGauges
from holdfast.operations.metrics import render_metrics
from holdfast.triggers.state import TriggerCounters
from tests.servers import find_server
from tools.servers import PROMTOOL

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "ops" / "prometheus" / "rules.yml"
TESTS = ROOT / "ops" / "prometheus" / "tests.yml"
DASHBOARD = ROOT / "ops" / "grafana" / "holdfast.json"
RUNBOOKS = ROOT / "docs" / "how-to" / "runbooks.md"
REFERENCE = ROOT / "docs" / "reference" / "metrics.md"

_METRIC = re.compile(
    r"\b(?:holdfast|queue_(?:messages|processing|active|dedup|consume|consumer|runtime)|outbox_publish|outbox(?=_backlog))"
    r"_[a-z_]+"
)
HISTOGRAMS = {
    "holdfast_task_process_seconds",
    "queue_processing_duration_seconds",
    "queue_consume_delay_seconds",
    "outbox_publish_seconds",
    "outbox_publish_delay_seconds",
}
#: The alerts that requirement M2 demands.
REQUIRED = {
    "HoldfastFailures",
    "HoldfastLag",
    "HoldfastNoActiveWorkers",
    "HoldfastRetryingRatio",
    "HoldfastDlqPendingGrowing",
    "HoldfastIllegalMoves",
    "HoldfastBacklog",
    "HoldfastFeedLag",
    "HoldfastTriggerFailures",
    "HoldfastTriggerLag",
    "HoldfastTriggerNoActiveWorkers",
    "HoldfastOutboxDelay",
    "HoldfastTenantDeadLetters",
}


def promtool(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [find_server(PROMTOOL), *words], cwd=RULES.parent, capture_output=True, text=True, check=False, timeout=50
    )


def alerts() -> dict[str, str]:
    """Name → the text of its rule."""
    parts = re.split(r"^ +- alert: (\w+)$", RULES.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def make_store_gauges() -> StoreGauges:
    queue = QueueGauges(
        queue="q",
        streams={"stream:task": 1},
        task_stream="stream:task",
        group="g",
        pending=1,
        waiting=1,
        backlog=1,
        backlog_alert=1,
        states={"queued": 1},
        workers=1,
        dead_letters=1,
        retrying_ratio=0.5,
        concurrency=1,
        feed_lag_entries=1,
        feed_lag_s=1.0,
        verified=1,
    )
    one = {"acme": 1}
    return StoreGauges(
        engine_up=True,
        queues=[queue],
        ledger_up=True,
        dlq_pending=one,
        approvals_waiting=one,
        alerts=["backlog:q"],
        outbox_backlog=1,
    )


def known_metrics() -> set[str]:
    """The names of all samples that can be scraped."""
    counts = Counters(triggers={"t": TriggerCounters("q", lag=1)}, outbox=OutboxStats())
    counts.tenant_failures.add("acme", "dead")
    families = MetricsCollector("holdfast", counts, make_store_gauges()).collect()
    return {sample.name for family in families for sample in family.samples}


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    return found


def test_promtool_accepts_the_rules() -> None:
    done = promtool("check", "rules", RULES.name)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_rule_fires_when_it_should_and_only_then() -> None:
    done = promtool("test", "rules", TESTS.name)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_wrong_rule_fails(tmp_path: Path) -> None:
    for path in (RULES, TESTS):
        text = path.read_text(encoding="utf-8").replace("holdfast_queue_lag) > 1000", "holdfast_queue_lag) > 9000")
        (tmp_path / path.name).write_text(text, encoding="utf-8")
    done = promtool("test", "rules", str(tmp_path / TESTS.name))
    assert done.returncode != 0
    assert "HoldfastLag" in done.stdout + done.stderr


def test_all_required_alerts_exist() -> None:
    assert set(alerts()) >= REQUIRED


@pytest.mark.parametrize("name", sorted(alerts()))
def test_every_alert_is_tested_firing_and_quiet(name: str) -> None:
    cases = TESTS.read_text(encoding="utf-8").split("  - name: ")[1:]
    own = [case for case in cases if f"alertname: {name}\n" in case]
    assert any(re.search(rf"alertname: {name}\n +exp_alerts:\n", case) for case in own), "never seen firing"
    assert any("exp_alerts: []" in case and "exp_alerts:\n" not in case for case in own), "never seen quiet"


@pytest.mark.parametrize(("name", "rule"), sorted(alerts().items()))
def test_every_alert_has_a_severity_and_a_runbook(name: str, rule: str) -> None:
    assert re.search(r"severity: (critical|warning)\n", rule)
    for annotation in ("summary", "description"):
        assert re.search(rf'{annotation}: ".{{10,}}"\n', rule)
    assert f"runbook: docs/how-to/runbooks.md#{name.lower()}" in rule
    sections = re.split(r"^## (\w+)$", RUNBOOKS.read_text(encoding="utf-8"), flags=re.MULTILINE)
    texts = dict(zip(sections[1::2], sections[2::2], strict=True))
    assert len(texts[name].split()) > 40, "its runbook says too little"


def test_every_runbook_is_for_an_existing_alert() -> None:
    sections = re.findall(r"^## (\w+)$", RUNBOOKS.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert sorted(sections) == sorted(alerts())


def test_rules_and_dashboard_use_only_existing_metrics() -> None:
    queries = [target["expr"] for panel in panels() for target in panel.get("targets", [])]
    for text in [*alerts().values(), TESTS.read_text(encoding="utf-8"), *queries]:
        assert set(_METRIC.findall(text)) <= known_metrics(), text


def test_the_dashboard_shows_every_metric() -> None:
    shown = set(_METRIC.findall(json.dumps(panels())))
    histogram = {f"{name}_{part}" for name in HISTOGRAMS for part in ("count", "sum")}
    assert known_metrics() - histogram <= shown


def test_the_dashboard_can_be_imported() -> None:
    found = panels()
    assert len({panel["id"] for panel in found}) == len(found)
    taken: set[tuple[int, int]] = set()
    for panel in found:
        position = panel["gridPos"]
        assert position["x"] + position["w"] <= 24
        cells = {
            (x, y)
            for x in range(position["x"], position["x"] + position["w"])
            for y in range(position["y"], position["y"] + position["h"])
        }
        assert not cells & taken, f"{panel['title']} overlaps another panel"
        taken |= cells


def test_the_reference_explains_every_metric_and_no_other() -> None:
    explained = set(re.findall(r"^\| `(\w+)`", REFERENCE.read_text(encoding="utf-8"), flags=re.MULTILINE))
    names = known_metrics() - {f"{name}_{part}" for name in HISTOGRAMS for part in ("bucket", "count", "sum")}
    assert explained == {name.removeprefix("holdfast") for name in names | HISTOGRAMS}


async def test_the_prefix_can_be_set() -> None:
    async with Holdfast("sqlite://", metrics_prefix="ingest") as app:
        text, content_type = await render_metrics(app)
    families = list(text_string_to_metric_families(text.decode()))
    assert families
    # Metrics with fixed names keep them.
    assert all(family.name.startswith(("ingest_", "outbox_", "queue_")) for family in families)
    assert content_type.startswith("text/plain")
