"""Small runs of `holdfast chaos`: one without defects, and one whose defects the checks find."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from functools import partial
from itertools import product
from pathlib import Path
from typing import Final

import msgspec
import pytest
from redis import Redis
from typer.testing import CliRunner

import holdfast.verification.chaos.run
from holdfast.cli.command import ExitCode
from holdfast.cli.program import program
from holdfast.clock import SystemClock
from holdfast.ledger.sqlite.ledger import SqliteLedger
from holdfast.ledger.sqlite.store import SqliteLedgerStore, prepare_ledger
from holdfast.sqlite.connection import DatabaseFile
from holdfast.verification.chaos.checks import (
    Findings,
    LedgerRow,
    _check_answers,
    _check_poison,
    check_forgotten,
    check_recoveries,
    lagging,
)
from holdfast.verification.chaos.deployment import Deployment
from holdfast.verification.chaos.load import ACCEPTED, CANCELLED, IN_DOUBT, REFUSED, REPLAYED, SubmissionJournal
from holdfast.verification.chaos.parts import DiskPostgres, Fault, FaultKind, FaultResult
from holdfast.verification.chaos.report import ChaosReport, blame, document, faults_table, markdown, summary
from holdfast.verification.chaos.run import ChaosOptions
from holdfast.verification.chaos.workload import (
    CRASH_JOBS,
    PILLS,
    crash_items,
    effects_file,
    external_effects,
    item_of,
    probe,
    work_item,
)

#: Four faults: a job ends its worker, a worker is killed, connections are cut, and Redis has outages.
SEED: Final = 28199
#: A seed with many operator actions in few jobs: three jobs are expedited, one is cancelled, two dead letters replayed.
BUSY_SEED: Final = 307
_TIMEOUT_S: Final = 240


@pytest.mark.faults
@pytest.mark.redis
@pytest.mark.postgres
@pytest.mark.timeout(300)
def test_a_short_run_has_no_defects(tmp_path: Path) -> None:
    words = ["--jobs", "160", "--faults", "4", "--seed", str(SEED), "--workers", "2", "--rate", "50"]
    words += ["--folder", str(tmp_path / "run"), "--report", str(tmp_path / "report.json"), "--json"]
    result = subprocess.run(
        [sys.executable, "-m", "holdfast", "chaos", *words],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    print(f"seed {SEED}\n{result.stderr}")
    report = json.loads(result.stdout)
    assert result.returncode == 0, report["findings"]["defects"]
    assert report == json.loads((tmp_path / "report.json").read_text())
    findings = report["findings"]
    assert (findings["accepted"], findings["lost"], findings["defects"]) == (160, 0, [])
    assert sum(findings["ended"].values()) == 160 + 4 + CRASH_JOBS + findings["replayed"]
    assert {item["fault"]["number"] for item in report["struck"]} == set(range(1, 5))
    assert {item["fault"]["kind"] for item in report["struck"]} >= {"crash", "kill", "outages"}
    # Six processes, of which the last five ran nothing else; fewer if an outage makes a lease expire first.
    assert (findings["poison_pills"], findings["crashes"] >= 2, findings["deaths"] >= 1) == (1, True, True)
    assert all(item["recovered_s"] >= 0 for item in report["struck"] if not item["skipped"])
    # The command that repeats the run.
    assert f"--seed {SEED}" in result.stderr


# The checks can fail ---------------------------------------------------------------------------------------


@pytest.mark.faults
@pytest.mark.redis
@pytest.mark.postgres
@pytest.mark.timeout(300)
def test_the_checks_find_every_defect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corruption = Corruption()
    monkeypatch.setattr(
        holdfast.verification.chaos.run, "run", partial(holdfast.verification.chaos.run.run, meddle=corruption.meddle)
    )
    monkeypatch.setattr("holdfast.verification.chaos.operators._WORKS_S", (0.0, 0.2))
    words = ["--jobs", "60", "--faults", "0", "--seed", str(BUSY_SEED), "--workers", "1", "--rate", "60"]
    result = CliRunner().invoke(program(), ["chaos", *words, "--folder", str(tmp_path / "run"), "--json"])
    print(result.stderr)
    assert result.exit_code == 1, result.output
    report = json.loads(result.stdout)
    reported = "\n".join(report["findings"]["defects"])
    for expected in corruption.expected:
        assert expected in reported
    # Every kind of operator action was done.
    assert report["operator_actions"].keys() == {"cancelled", "expedited", "paused", "replayed", "resumed", "voted"}
    assert f"reproduce with: holdfast chaos --seed {BUSY_SEED}" in result.stderr


class Corruption:
    """Corrupts the stores of a finished run as no fault may."""

    def __init__(self) -> None:
        #: Defects that have to be reported.
        self.expected: list[str] = []

    def meddle(self, deployment: Deployment, journal: SubmissionJournal, folder: Path) -> None:
        plain = [
            next(iter(journal.accepted[number]))
            for number in sorted(journal.accepted)
            if work_item(BUSY_SEED, number, folder).kind == "plain"
        ]
        postgres, redis = deployment.parts["postgres"].process, deployment.parts["redis"].process
        assert isinstance(postgres, DiskPostgres)
        self._break_ledger(postgres, plain)
        with Redis(port=redis.port) as client:
            self._break_redis(client, plain[0])
        self._break_effects(postgres, folder)
        self._break_journal(journal, plain[0])

    def _break_ledger(self, postgres: DiskPostgres, jobs: list[str]) -> None:
        endless, ended_twice, lost, gap, renamed, changed = jobs[:6]
        copied = "tenant_id, job_id, queue, type, from_state, to_state, attempt, retry_count, at"
        end = "AND to_state = 'succeeded'"
        postgres.execute(
            f"DELETE FROM job_events WHERE job_id = '{endless}' {end};"
            f"INSERT INTO job_events ({copied}, seq) SELECT {copied}, seq + 1 FROM job_events "
            f"WHERE job_id = '{ended_twice}' {end};"
            f"DELETE FROM job_events WHERE job_id = '{lost}'; DELETE FROM jobs WHERE job_id = '{lost}';"
            f"UPDATE job_events SET seq = seq + 1 WHERE job_id = '{gap}' {end};"
            f"UPDATE job_events SET job_id = 'ghost' WHERE job_id = '{renamed}';"
            f"UPDATE jobs SET job_id = 'ghost' WHERE job_id = '{renamed}';"
            f"UPDATE jobs SET state = 'cancelled' WHERE job_id = '{changed}';"
            f"UPDATE jobs SET error_code = 'POISON_PILL' WHERE job_id = '{changed}';"
            "INSERT INTO anomalies SELECT tenant_id, 'a', job_id, queue, 'odd', '{}', created_at FROM jobs LIMIT 1;"
        )
        self.expected += [
            f"{endless} is succeeded and has 0 final events",
            f"{ended_twice} is succeeded and has 2 final events",
            "task.succeeded after it ended as succeeded",
            f"{lost}) is lost",
            "task.succeeded has number 4 after 2",
            "job ghost (plain",
            f"{changed}) is cancelled instead of succeeded",
            f"{changed} (plain) is a dead letter with POISON_PILL, though it ends no process",
            "1 anomalies in the ledger, though no store lost a write: odd",
        ]

    def _break_redis(self, redis: Redis, job_id: str) -> None:
        # In one transaction, before a worker adopts it as a foreign message.
        transaction = redis.pipeline(transaction=True)
        transaction.xadd("stream:task:high", {"any": "thing"})
        transaction.xreadgroup("cg:workers", "ghost-worker", {"stream:task:high": ">"})
        transaction.execute()
        redis.set("unknown", "1")
        redis.persist(f"job:{job_id}")
        redis.zadd("queue:delayed", {job_id: 1e15})
        redis.zadd("queue:workers", {"ghost-worker": 1})
        self.expected += [
            "stream:task:high has 1 messages",
            "stream:task:high has 1 pending entries in group cg:workers",
            "stream:task:high has 1 dead consumers: ghost-worker",
            "1 unknown keys: unknown",
            f"1 records without expiry: job:{job_id}",
            "queue:delayed has 1 entries",
            "queue:workers has 1 dead workers",
        ]

    def _break_effects(self, postgres: DiskPostgres, folder: Path) -> None:
        missing, repeated, *others = external_effects(folder)
        effects_file(folder).write_text("\n".join([repeated, repeated, *others]))
        postgres.execute(f"UPDATE idempotency_keys SET state = 'in_doubt', value = NULL WHERE key = '{repeated}'")
        self.expected += [
            f"effect {repeated} happened 2 times",
            f"effect {missing} never happened, though its job succeeded",
            f"effect {repeated} is still in_doubt",
        ]

    def _break_journal(self, journal: SubmissionJournal, job_id: str) -> None:
        number = journal.numbers[job_id]
        journal.write(ACCEPTED, number, "another-job")
        journal.write(CANCELLED, number, job_id)
        journal.write(REPLAYED, number, "promised", job_id)
        journal.write(REFUSED, 1_000, note="no")
        self.expected += [
            f"one idempotency key, several jobs: number {number} is ",
            f"{job_id}) is succeeded, though its cancellation was confirmed",
            "job promised is lost",
            "job 1000 was refused: no",
        ]


# Without servers ----------------------------------------------------------------------------------------------


def test_a_job_depends_only_on_seed_and_number(tmp_path: Path) -> None:
    ascending = [work_item(SEED, number, tmp_path) for number in range(400)]
    descending = [work_item(SEED, number, tmp_path) for number in reversed(range(400))]
    assert ascending == descending[::-1]
    assert ascending != [work_item(SEED + 1, number, tmp_path) for number in range(400)]
    assert {item.kind for item in ascending} >= {"outside", "doomed", "flaky", "cancelled", "asked", "asking", "long"}
    assert {item.way for item in ascending} == {"http", "single", "bulk"}
    assert len({item.queue for item in ascending}) == 2
    assert len({item.tenant_id for item in ascending}) == 3
    assert all(item_of(SEED, item.number, tmp_path) == item for item in ascending)
    assert item_of(SEED, -8, tmp_path) == probe(SEED, 7)
    crashing = [item for number in range(1, 30) for item in crash_items(SEED, number, tmp_path)]
    assert all(item_of(SEED, item.number, tmp_path) == item for item in crashing)
    assert len({item.number for item in crashing}) == 29 * CRASH_JOBS
    pills = [item for item in crashing if item.task in PILLS]
    assert len(pills) == 29
    assert {(item.arguments["how"], item.task) for item in pills} == set(product(("abort", "exit", "kill"), PILLS))
    keys = [item.key for item in ascending] + [probe(SEED, number).key for number in range(10)]
    assert len(set(keys)) == len(keys)


@pytest.fixture
def options_run(monkeypatch: pytest.MonkeyPatch) -> list[ChaosOptions]:
    """The options of the runs that the command starts."""
    options_run: list[ChaosOptions] = []

    async def run(options: ChaosOptions, *_: object) -> ChaosReport:
        options_run.append(options)
        return ChaosReport(seed=1, topology="", workers=1, jobs=1, rate=1, command="")

    monkeypatch.setattr(holdfast.verification.chaos.run, "run", run)
    return options_run


@pytest.mark.parametrize("topology", ["single", "sentinel", "cluster"])
def test_the_command_of_a_run_repeats_it(topology: str, options_run: list[ChaosOptions]) -> None:
    binary = Path("/opt/redis 6.2/bin/redis-server")
    options = ChaosOptions(seed=7, jobs=500, faults=10, topology=topology, workers=2, rate=33.5, redis_binary=binary)
    single = topology == "single"
    options = msgspec.structs.replace(options, min_replicas=int(not single), rewind=single)
    result = CliRunner().invoke(program(), shlex.split(options.command)[1:])
    assert (result.exit_code, options_run) == (0, [options]), result.output
    assert options.command in result.stderr


@pytest.mark.parametrize("topology", ["sentinel", "cluster"])
def test_min_replicas_is_set_on_every_node(topology: str, tmp_path: Path) -> None:
    for min_replicas in (0, 1):
        deployment_topology = Deployment(tmp_path, topology=topology, min_replicas=min_replicas)._make_topology()
        needed = {node.options.get("min-replicas-to-write", "0") for node in deployment_topology.nodes().values()}
        assert needed == {str(min_replicas)}


@pytest.mark.parametrize(
    ("words", "jobs", "faults"),
    [
        ([], 2_000, 20),
        (["--long"], 100_000, 200),
        (["--long", "--jobs", "500"], 500, 200),
        (["--long", "--faults", "0"], 100_000, 0),
    ],
)
def test_options_set_the_number_of_jobs_and_faults(
    words: list[str], jobs: int, faults: int, options_run: list[ChaosOptions]
) -> None:
    result = CliRunner().invoke(program(), ["chaos", *words])
    assert result.exit_code == 0, result.output
    assert [(options.jobs, options.faults) for options in options_run] == [(jobs, faults)]


def test_min_replicas_is_refused_for_a_single_redis(options_run: list[ChaosOptions]) -> None:
    result = CliRunner().invoke(program(), ["chaos", "--min-replicas", "1"])
    assert (result.exit_code, options_run) == (ExitCode.USAGE, [])
    assert "--topology sentinel" in result.stderr


def test_only_a_single_redis_comes_back_with_older_data(options_run: list[ChaosOptions]) -> None:
    result = CliRunner().invoke(program(), ["chaos", "--rewind", "--topology", "cluster"])
    assert (result.exit_code, options_run) == (ExitCode.USAGE, [])
    assert "omit --topology" in result.stderr


def test_platforms_other_than_linux_are_refused(
    options_run: list[ChaosOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = program()
    monkeypatch.setattr("sys.platform", "darwin")
    result = CliRunner().invoke(commands, ["chaos"])
    assert (result.exit_code, options_run) == (ExitCode.USAGE, [])
    assert "does not run on darwin" in result.stderr


def test_the_journal_keeps_every_entry(tmp_path: Path) -> None:
    journal = SubmissionJournal(tmp_path / "journal.jsonl", SEED)
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
    assert (journal.work_items, journal.receipts, journal.doubts) == (1, 3, 1)


def test_lost_jobs_are_attributed_to_the_fault_that_lost_them() -> None:
    """Before it: not replicated yet. During it: accepted by a server that was then demoted."""
    kill = Fault(number=1, at=0.1, kind=FaultKind.FAIL_OVER, target="redis")
    stop = Fault(number=2, at=0.5, kind=FaultKind.STOP, target="redis-2", seconds=4)
    fault_results = [
        FaultResult(fault=stop, accepted=9, began_at=50, ended_at=60),
        FaultResult(kill, 1, began_at=10, ended_at=20),
    ]
    assert blame([9.9, 12, 13, 20.5, 55, 61], fault_results) == {
        "before fault 1, fail-over redis": 1,
        "during fault 1, fail-over redis": 2,
        "before fault 2, stop redis-2": 1,
        "during fault 2, stop redis-2": 1,
        "accepted after all faults": 1,
    }


def test_redis_may_lose_jobs_only_around_its_own_faults(tmp_path: Path) -> None:
    journal = SubmissionJournal(tmp_path / "journal.jsonl", SEED)
    journal.accepted_at = {"long before": 10, "just before": 99, "during": 103, "after": 130}
    fault = Fault(number=1, at=0.1, kind=FaultKind.FAIL_OVER, target="redis")
    findings = Findings(forgetful=True, forgotten=4, forgotten_jobs=list(journal.accepted_at))
    check_forgotten(findings, journal, [FaultResult(fault, 1, began_at=100, ended_at=110)])
    journal.close()
    assert findings.forgotten_jobs == ["just before", "during"]
    assert (findings.forgotten, findings.lost, findings.defect_count) == (2, 2, 2)


@pytest.mark.parametrize(
    ("task", "code", "crashes", "defect"),
    [
        ("crash", "POISON_PILL", 6, ""),
        ("crash", "TASK_ERROR", 6, "failed with TASK_ERROR"),
        ("crash", "POISON_PILL", 1, "after less than two lost workers"),
        ("doomed", "POISON_PILL", 6, "though it ends no process"),
        ("doomed", "TASK_ERROR", 0, ""),
    ],
)
def test_only_jobs_that_end_their_workers_are_poison_pills(
    task: str, code: str, crashes: int, defect: str, tmp_path: Path
) -> None:
    (tmp_path / "crashes.jsonl").write_text('{"job_id":"a","pid":7,"at":1.0}\n' * crashes)
    findings = Findings()
    row = LedgerRow("default", "a", "default", task, "failed", "key", 6, code, None)
    _check_poison(findings, {"a": row}, tmp_path)
    assert (findings.defect_count, findings.crashes) == (bool(defect), crashes)
    assert defect in "".join(findings.defects)


def test_an_unanswered_job_is_a_defect(tmp_path: Path) -> None:
    journal = SubmissionJournal(tmp_path / "journal.jsonl", SEED)
    journal.write(ACCEPTED, 0, "a")
    journal.write(REFUSED, 1, note="no")
    findings = Findings()
    _check_answers(findings, journal, 2)
    assert findings.ok
    _check_answers(findings, journal, 4)
    journal.close()
    assert findings.defects == ["2 jobs were neither accepted nor refused, the first is number 2"]


async def test_a_feed_that_was_not_read_to_its_end_is_reported(tmp_path: Path) -> None:
    ledger = SqliteLedger(SqliteLedgerStore(DatabaseFile(str(tmp_path / "ledger.db")), prepare_ledger), SystemClock())
    await ledger.store.open()
    assert await lagging(ledger.queries, {"default": "0-0"}) == []
    assert await lagging(ledger.queries, {"default": "5-1"}) == [
        "it has read the feed of default to None, which ends at 5-1"
    ]
    await ledger.close()


def test_a_report_says_never_where_work_did_not_recover() -> None:
    def make_fault_result(number: int, target: str, recovered_s: float, skipped: str = "") -> FaultResult:
        fault = Fault(number=number, at=0.5, kind=FaultKind.KILL, target=target)
        return FaultResult(fault=fault, accepted=1, recovered_s=recovered_s, skipped=skipped)

    faults = [
        make_fault_result(1, "worker-1", 1.0),
        make_fault_result(2, "worker-2", 3.0),
        make_fault_result(3, "redis", 2.0),
        make_fault_result(4, "redis", -1.0),
    ]
    faults.append(make_fault_result(5, "postgres", -1.0, "no disk"))
    assert check_recoveries(faults, 30.0) == ["no job ended within 30 s after fault 4, kill redis"]
    assert faults_table(faults) == [
        ("kill", "redis", "2", "0.50", "never"),
        ("kill", "worker", "2", "2.00", "3.00"),
    ]
    findings = Findings(accepted=10)
    findings.add("job 3 is lost")
    report = ChaosReport(
        seed=1,
        topology="single",
        workers=3,
        jobs=10,
        rate=20,
        command="holdfast chaos",
        struck=faults,
        findings=findings,
        operator_actions={"cancelled": 3, "paused": 1},
        ended_s=4.25,
        tidy_s=61.5,
    )
    assert not report.ok
    reported = dict(summary(report))
    assert reported["faults"] == "4 done, 1 not possible"
    assert reported["operator actions"] == "3 cancelled, 1 paused"
    assert reported["seconds to recover"] == "2.00, at most 3.00"
    assert (reported["… until the last end"], reported["… until Redis was empty"]) == ("4.2", "61.5")
    assert reported["lost"] == "nothing"
    assert document(report)["ok"] is False
    assert "| kill | worker | 2 | 2.00 | 3.00 |" in markdown(report)
    assert "- job 3 is lost" in markdown(report)
