"""`holdfast chaos` in small: a run that is sound, and checks that see what is not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Final

import pytest
from redis import Redis
from typer.testing import CliRunner

import holdfast.chaos.run
from holdfast.chaos.checks import Findings
from holdfast.chaos.deployment import Deployment
from holdfast.chaos.jobs import effects_file, errand, lines_outside, probe
from holdfast.chaos.journal import ACCEPTED, IN_DOUBT, Journal
from holdfast.chaos.model import Fault, Kind, Struck
from holdfast.chaos.parts import DiskPostgres
from holdfast.chaos.report import Report, blame, document, faults_table, markdown
from holdfast.chaos.servers import RedisServer
from holdfast.cli.program import program

SEED: Final = 365
_PATIENCE_S: Final = 240


@pytest.mark.faults
@pytest.mark.redis
@pytest.mark.postgres
@pytest.mark.timeout(300)
def test_a_short_run_is_sound(tmp_path: Path) -> None:
    words = ["--jobs", "160", "--faults", "5", "--seed", str(SEED), "--workers", "2", "--rate", "50"]
    words += ["--folder", str(tmp_path / "run"), "--report", str(tmp_path / "report.json"), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "holdfast", "chaos", *words],
        capture_output=True,
        text=True,
        timeout=_PATIENCE_S,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    print(f"seed {SEED}\n{done.stderr}")
    report = json.loads(done.stdout)
    assert done.returncode == 0, report["findings"]["defects"]
    assert report == json.loads((tmp_path / "report.json").read_text())
    found = report["findings"]
    assert (found["accepted"], found["lost"], found["defects"]) == (160, 0, [])
    assert sum(found["ended"].values()) == 160 + 5 + found["replayed"]
    assert {each["fault"]["number"] for each in report["struck"]} == set(range(1, 6))
    assert all(each["recovered_s"] >= 0 for each in report["struck"] if not each["skipped"])
    # What it takes to run it again.
    assert f"--seed {SEED}" in done.stderr


# Checks that cannot fail are none ---------------------------------------------------------------------------


@pytest.mark.faults
@pytest.mark.redis
@pytest.mark.postgres
@pytest.mark.timeout(300)
def test_the_checks_see_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Broken()
    monkeypatch.setattr(holdfast.chaos.run, "run", partial(holdfast.chaos.run.run, meddle=broken.meddle))
    words = ["--jobs", "60", "--faults", "0", "--seed", str(SEED), "--workers", "1", "--rate", "60"]
    done = CliRunner().invoke(program(), ["chaos", *words, "--folder", str(tmp_path / "run"), "--json"])
    print(done.stderr)
    assert done.exit_code == 1, done.output
    defects = json.loads(done.stdout)["findings"]["defects"]
    told = "\n".join(defects)
    assert f"{broken.endless} is succeeded and has 0 final events" in told
    assert f"{broken.ended_twice} is succeeded and has 2 final events" in told
    assert "task.succeeded after it ended as succeeded" in told
    assert f"{broken.lost}) is lost" in told
    assert f"effect {broken.repeated} happened 2 times" in told
    assert "stream:task:high has 1 pending entries in group cg:workers" in told
    assert "1 keys that nobody knows: stray" in told
    assert f"number {broken.number} is " in told
    assert f"the same again: holdfast chaos --seed {SEED}" in done.stderr


class Broken:
    """Does to the stores of a finished run what no fault may do."""

    def meddle(self, deployment: Deployment, journal: Journal, folder: Path) -> None:
        plain = [
            next(iter(journal.accepted[number]))
            for number in sorted(journal.accepted)
            if errand(SEED, number, folder).kind == "plain"
        ]
        self.endless, self.ended_twice, self.lost = plain[:3]
        self._break_ledger(deployment)
        with Redis(port=_redis(deployment).port) as redis:
            # Ours before a worker sees it, which would take it for another program's message.
            together = redis.pipeline(transaction=True)
            together.xadd("stream:task:high", {"any": "thing"})
            together.xreadgroup("cg:workers", "ghost", {"stream:task:high": ">"})
            together.execute()
            redis.set("stray", "1")
        self.repeated = lines_outside(folder)[0]
        with effects_file(folder).open("a") as outside:
            outside.write(f"{self.repeated}\n")
        self.number = journal.numbers[self.endless]
        journal.write(ACCEPTED, self.number, "another-job")

    def _break_ledger(self, deployment: Deployment) -> None:
        postgres = deployment.parts["postgres"].process
        assert isinstance(postgres, DiskPostgres)
        postgres.execute(f"DELETE FROM job_events WHERE job_id = '{self.endless}' AND to_state = 'succeeded'")
        copied = "tenant_id, job_id, queue, type, from_state, to_state, attempt, retry_count, at"
        postgres.execute(
            f"INSERT INTO job_events ({copied}, seq) SELECT {copied}, seq + 1 FROM job_events "
            f"WHERE job_id = '{self.ended_twice}' AND to_state = 'succeeded'"
        )
        for table in ("job_events", "jobs"):
            postgres.execute(f"DELETE FROM {table} WHERE job_id = '{self.lost}'")


def _redis(deployment: Deployment) -> RedisServer:
    process = deployment.parts["redis"].process
    assert isinstance(process, RedisServer)
    return process


# What needs no servers ----------------------------------------------------------------------------------------


def test_a_job_follows_from_seed_and_number_alone(tmp_path: Path) -> None:
    forwards = [errand(SEED, number, tmp_path) for number in range(400)]
    backwards = [errand(SEED, number, tmp_path) for number in reversed(range(400))]
    assert forwards == backwards[::-1]
    assert forwards != [errand(SEED + 1, number, tmp_path) for number in range(400)]
    assert {each.kind for each in forwards} >= {"outside", "doomed", "flaky", "cancelled", "asked", "asking", "long"}
    assert {each.way for each in forwards} == {"http", "single", "bulk"}
    assert len({each.queue for each in forwards}) == 2
    assert len({each.tenant_id for each in forwards}) == 3
    keys = [each.key for each in forwards] + [probe(SEED, number).key for number in range(10)]
    assert len(set(keys)) == len(keys)


def test_the_journal_keeps_every_line(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl", SEED)
    journal.write(IN_DOUBT, 7, note="no answer")
    journal.write(ACCEPTED, 7, "a", "post")
    journal.write(ACCEPTED, 7, "b", "submit")
    journal.write(ACCEPTED, -1, "probe")
    lines = [json.loads(line) for line in journal.path.read_text().splitlines()]
    journal.close()
    assert [(line["said"], line["number"]) for line in lines] == [
        ("in doubt", 7), ("accepted", 7), ("accepted", 7), ("accepted", -1)
    ]  # fmt: skip
    assert journal.accepted[7] == {"a", "b"}
    assert (journal.errands, journal.receipts, journal.doubts) == (1, 3, 1)


def test_what_redis_forgot_is_put_down_to_the_fault_that_it_went_with() -> None:
    """Before it: not passed on yet. During it: taken by a server that was not to stay the master."""
    kill = Fault(number=1, at=0.1, kind=Kind.FAIL_OVER, target="redis")
    stop = Fault(number=2, at=0.5, kind=Kind.STOP, target="redis-2", seconds=4)
    struck = [Struck(fault=stop, accepted=9, began_at=50, over_at=60), Struck(kill, 1, began_at=10, over_at=20)]
    assert blame([9.9, 12, 13, 20.5, 55, 61], struck) == {
        "before fault 1, fail-over redis": 1,
        "during fault 1, fail-over redis": 2,
        "before fault 2, stop redis-2": 1,
        "during fault 2, stop redis-2": 1,
        "accepted after all faults": 1,
    }


def test_a_report_says_never_where_work_did_not_go_on() -> None:
    def struck(number: int, target: str, recovered_s: float, skipped: str = "") -> Struck:
        fault = Fault(number=number, at=0.5, kind=Kind.KILL, target=target)
        return Struck(fault=fault, accepted=1, recovered_s=recovered_s, skipped=skipped)

    faults = [struck(1, "worker-1", 1.0), struck(2, "worker-2", 3.0), struck(3, "redis", 2.0), struck(4, "redis", -1.0)]
    faults.append(struck(5, "postgres", -1.0, "no disk"))
    assert faults_table(faults) == [
        ("kill", "redis", "2", "0.50", "never"),
        ("kill", "worker", "2", "2.00", "3.00"),
    ]
    findings = Findings(accepted=10)
    findings.add("job 3 is lost")
    report = Report(
        seed=1,
        topology="single",
        workers=3,
        jobs=10,
        rate=20,
        command="holdfast chaos",
        struck=faults,
        findings=findings,
    )
    assert not report.ok
    assert document(report)["ok"] is False
    assert "| kill | worker | 2 | 2.00 | 3.00 |" in markdown(report)
    assert "- job 3 is lost" in markdown(report)
