"""`jobs list`, `show`, `counts`, `explain` and `verify` on a ledger, embedded or next to Redis."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from holdfast import State
from tests.cli.harness import Shell, eventually
from tests.cli.test_commands import InProcess


@pytest.fixture
def cli(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> InProcess:
    """The program in this process, on the shell's database."""
    monkeypatch.chdir(shell.folder)
    monkeypatch.setenv("HOLDFAST_URL", shell.environment["HOLDFAST_URL"])
    return InProcess()


@pytest.fixture
def worked(shell: Shell, cli: InProcess) -> dict[str, str]:
    """One job of each kind, by name: queued, succeeded after a retry, failed."""
    jobs = {
        "flaky": cli.json("submit", "--force", "flaky", "--key", "f-1")["job_id"],
        "dead": cli.json("submit", "--force", "refuse", "--arg", "reason=Never Ever", "--tenant", "acme")["job_id"],
    }
    _work(shell, jobs)
    jobs["queued"] = cli.json("submit", "--force", "add", "--arg", "a=1")["job_id"]
    return jobs


def _work(shell: Shell, jobs: dict[str, str]) -> None:
    with shell.start("worker", "sample:app"):
        shell.wait_state(jobs["flaky"], State.SUCCEEDED)
        shell.wait_state(jobs["dead"], State.FAILED)


def ids(cli: InProcess, *words: str) -> list[str]:
    return [job["job_id"] for job in cli.json("jobs", "list", *words)]


def test_jobs_are_listed_by_every_filter(cli: InProcess, worked: dict[str, str]) -> None:
    flaky, dead, queued = worked["flaky"], worked["dead"], worked["queued"]
    assert ids(cli) == [queued, dead, flaky]
    assert ids(cli, "--type", "refuse") == [dead]
    assert ids(cli, "--tenant", "acme", "--state", "failed") == [dead]
    assert ids(cli, "--error", "never EVER") == [dead]
    assert ids(cli, "--trace", "t-1") == []
    assert ids(cli, "--key", "f-1") == [flaky]
    assert ids(cli, "--since", "1h", "--until", "2099-01-01T00:00:00Z") == [queued, dead, flaky]
    assert ids(cli, "--until", "1h") == []


def test_jobs_are_paged_by_cursor(cli: InProcess, worked: dict[str, str]) -> None:
    first = cli.run("jobs", "list", "--limit", "2")
    assert worked["queued"] in first.stdout
    cursor = first.stderr.split("--cursor ")[1].strip()
    assert ids(cli, "--cursor", cursor) == [worked["flaky"]]
    assert "is not a cursor" in cli.run("jobs", "list", "--cursor", "nonsense", code=2).stderr
    assert "no time zone" in cli.run("jobs", "list", "--since", "2026-01-01", code=2).stderr


def test_show_has_every_attempt_and_its_stack(cli: InProcess, worked: dict[str, str]) -> None:
    output = cli.run("jobs", "show", worked["flaky"], "--stack").stdout
    assert "retrying\tattempt 1: ValueError: not yet" in output
    assert "attempt 2\tbegan on" in output
    assert "Traceback" in output
    document = cli.json("jobs", "show", worked["dead"])
    assert [event["type"] for event in document["events"]] == [
        "task.created",
        "task.claimed",
        "task.dlq_pending",
        "task.dlq",
        "task.failed",
    ]
    assert [event["seq"] for event in document["events"]] == [1, 2, 3, 4, 5]
    assert document["dead_letter"]["status"] == "open"
    assert "Never Ever" in document["dead_letter"]["error"]
    assert (document["steps"], document["effects"]) == ([], [])
    assert f"dead letter {document['dlq_id']} (open)" in cli.run("jobs", "show", worked["dead"]).stdout
    cli.run("jobs", "show", worked["dead"], "--tenant", "default", code=2)


def test_counts(cli: InProcess, worked: dict[str, str]) -> None:
    counts = cli.json("jobs", "counts")
    assert {state: count for state, count in counts["states"].items() if count} == {
        "queued": 1,
        "succeeded": 1,
        "failed": 1,
    }
    assert counts["estimated"] == []
    assert "failed\t1" in cli.run("jobs", "counts", "--tenant", "acme").stdout


def test_explain(cli: InProcess, worked: dict[str, str]) -> None:
    lines = cli.run("explain", worked["dead"]).stdout.splitlines()
    assert lines[0].endswith('UTC to run refuse with {"reason":"Never Ever"}.')
    assert "This job will not run again." in lines[-1]
    document = cli.json("explain", worked["queued"])
    assert document["reason"][0].startswith("It has been queued for ")
    answer = cli.run("explain", "nope", code=2)
    assert "UNKNOWN_JOB" in answer.stderr


def test_verify_can_pass_and_fail(cli: InProcess, worked: dict[str, str], tmp_path: Path) -> None:
    done = cli.run("verify", "--ledger")
    assert "faults\t0" in done.stdout
    assert cli.json("verify", "--ledger", "--since", "1h")["jobs"] == 3
    assert "--ledger" in cli.run("verify", code=2).stderr
    with sqlite3.connect(tmp_path / "jobs.db") as file:
        file.execute("DELETE FROM events WHERE type = 'task.retrying'")
    file.close()
    broken = cli.run("verify", "--ledger", code=1)
    assert worked["flaky"] in broken.stderr
    assert "has number" in broken.stderr
    document = cli.json("verify", "--ledger", code=1)
    assert document["ok"] is False
    assert document["faults"][0]["key"]["job_id"] == worked["flaky"]


@pytest.mark.redis
def test_without_a_ledger_the_engine_is_read_with_a_warning(
    cli: InProcess, monkeypatch: pytest.MonkeyPatch, redis_url: str, namespace: str
) -> None:
    monkeypatch.setenv("HOLDFAST_URL", redis_url)
    monkeypatch.setenv("HOLDFAST_NAMESPACE", namespace)
    cli.submit("add", "--arg", "a=1")
    states = cli.json("jobs", "watch", "--timeout", "0", code=5)["queues"][0]["states"]
    assert (len(states), states["queued"], states["succeeded"]) == (10, 1, None)
    monkeypatch.setenv("HOLDFAST_LEDGER", "sqlite:///not-made-yet.db")
    watched = cli.run("jobs", "watch", "--timeout", "0", "--json", code=5)
    assert "finished jobs are not counted: ledger " in watched.stderr
    assert "not-made-yet.db does not exist" in watched.stderr
    monkeypatch.delenv("HOLDFAST_LEDGER")
    listed = cli.run("jobs", "list")
    assert "add" in listed.stdout
    assert "there is no ledger" in listed.stderr
    for words in (["jobs", "list", "--type", "add"], ["jobs", "counts"], ["explain", "x"], ["verify", "--ledger"]):
        assert "there is no ledger" in cli.run(*words, code=2).stderr


@pytest.mark.redis
def test_a_ledger_next_to_redis(
    shell: Shell, cli: InProcess, monkeypatch: pytest.MonkeyPatch, redis_url: str, namespace: str
) -> None:
    ledger = f"sqlite:///{shell.folder}/ledger.db"
    more = {"HOLDFAST_URL": redis_url, "HOLDFAST_NAMESPACE": namespace, "HOLDFAST_LEDGER": ledger}
    for name, value in more.items():
        monkeypatch.setenv(name, value)
    assert f"ledger {shell.folder}/ledger.db does not exist" in cli.run("jobs", "list", code=2).stderr
    job_id = cli.submit("add", "--arg", "a=1")
    with shell.start("worker", "sample:app", **more):
        eventually(lambda: ids(cli, "--state", "succeeded") == [job_id], what="the job to be succeeded in the ledger")
    assert [event["type"] for event in cli.json("jobs", "show", job_id)["events"]][-1] == "task.succeeded"
    assert cli.json("verify", "--ledger")["events"] == 3
