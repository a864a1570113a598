"""Long-running commands as real processes: start, work, drain, stop now, and recovery after a kill."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from typing import Any

import pytest

from holdfast import State
from holdfast.core.states import FINAL
from tests.cli.harness import TIMEOUT_S, Process, Shell, eventually


def log_lines(process: Process) -> list[dict[str, Any]]:
    return [json.loads(line) for line in process.log.read_text().splitlines()]


def test_a_worker_works_and_drains_at_sigterm(shell: Shell) -> None:
    with shell.start("worker", "sample.py:app", "--name", "blue", "--concurrency", "4") as worker:
        worker.wait_log("started")
        done = shell.run("submit", "--force", "add", "--arg", "a=40", "--arg", "b=2", "--wait", "30")
        assert done.stdout == "42\n"
        retried = shell.json("submit", "flaky", "--app", "sample.py", "--wait", "30")
        assert retried["result"] == "now"
        other = shell.json("submit", "elsewhere", "--app", "sample.py:app", "--wait", "30")
        assert other["queue"] == "other"
        assert worker.end() == 0
    started = next(line for line in log_lines(worker) if "started" in line["message"])
    assert started["queues"] == ["default", "other"]
    assert started["tasks"] == ["add", "elsewhere", "flaky", "refuse", "slow"]
    assert "blue" in started["incarnation"]
    assert started["engine"].startswith("sqlite:///")
    output = shell.run("jobs", "show", retried["job_id"]).stdout
    assert "ValueError: not yet" in output
    assert "attempt 2" in output


def test_a_job_that_fails_is_exit_code_1(shell: Shell) -> None:
    with shell.start("worker", "sample:app") as worker:
        worker.wait_log("started")
        failed = shell.run("submit", "--force", "refuse", "--arg", "reason=never", "--wait", "30", code=1)
    assert "holdfast: JOB_FAILED: " in failed.stderr
    assert "never" in failed.stderr
    assert failed.stdout == ""
    (job,) = shell.json("jobs", "list", "--state", "failed")
    assert job["failure"]["code"] == "TASK_FATAL"
    assert "Fatal" in shell.run("jobs", "show", job["job_id"], "--stack").stdout


def test_a_running_job_is_finished_before_the_worker_ends(shell: Shell) -> None:
    with shell.start("worker", "sample.py:app") as worker:
        worker.wait_log("started")
        job_id = shell.run("submit", "--force", "slow", "[3]").stdout.strip()
        shell.wait_begun(job_id)
        assert worker.end() == 0
        assert shell.info(job_id).state is State.SUCCEEDED


def test_a_second_signal_stops_now_and_loses_nothing(shell: Shell) -> None:
    with shell.start("worker", "sample.py:app", HOLDFAST_DRAIN_GRACE_S="600") as worker:
        worker.wait_log("started")
        job_id = shell.run("submit", "--force", "slow", "[600]").stdout.strip()
        shell.wait_begun(job_id)
        worker.process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            worker.process.wait(0.5)
        worker.process.send_signal(signal.SIGINT)
        assert worker.process.wait(TIMEOUT_S) == 0
    assert shell.info(job_id).state not in FINAL


def test_a_job_whose_worker_is_killed_is_finished_by_another(shell: Shell) -> None:
    with shell.start("worker", "sample.py:app", "--name", "first") as first:
        first.wait_log("started")
        job_id = shell.run("submit", "--force", "slow", "[3]").stdout.strip()
        assert "first" in shell.wait_state(job_id, State.RUNNING).worker
        first.process.kill()
        first.process.wait()
    with shell.start("worker", "sample.py:app", "--name", "second") as second:
        second.wait_log("started")
        shell.wait_state(job_id, State.SUCCEEDED)
        assert second.end() == 0
    job = shell.json("jobs", "show", job_id)
    assert (job["attempt"], job["retry_count"], job["lost_leases"]) == (2, 0, 1)
    assert "second" in job["history"][-1]["worker"]
    assert "attempt 1\tlease lost" in shell.run("jobs", "show", job_id).stdout


def test_several_processes_work_and_drain_together(shell: Shell) -> None:
    with shell.start("worker", "sample.py:app", "--processes", "2") as worker:
        worker.wait_log("started")
        ids = [shell.run("submit", "--force", "add", f"[{number}]").stdout.strip() for number in range(3)]
        for job_id in ids:
            shell.wait_state(job_id, State.SUCCEEDED)
        assert worker.end() == 0


def test_ctrl_c_at_a_terminal_drains_all_processes(shell: Shell) -> None:
    """A terminal signals the whole process group, so the children must not take it for a second signal."""
    log = shell.folder / "group.log"
    with log.open("wb") as errors:
        leader = subprocess.Popen(
            shell.command("worker", "sample.py:app", "--processes", "2"),
            cwd=shell.folder,
            env=shell.environment,
            stdin=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
        )
    try:
        worker = Process(leader, log)
        worker.wait_log("queues default, other")
        job_id = shell.run("submit", "--force", "slow", "[2]").stdout.strip()
        shell.wait_begun(job_id)
        os.killpg(leader.pid, signal.SIGINT)
        assert leader.wait(TIMEOUT_S) == 0
    finally:
        leader.kill()
        leader.wait()
    job = shell.json("jobs", "show", job_id)
    assert (job["state"], job["attempt"]) == ("succeeded", 1)


def test_processes_whose_supervisor_is_killed_drain_by_themselves(shell: Shell) -> None:
    with shell.start("worker", "sample.py:app", "--processes", "2") as supervisor:
        eventually(lambda: supervisor.log.read_text().count("queues default, other") == 2, what="two workers")
        pids = [int(pid) for pid in re.findall(r"worker process \d started with pid (\d+)", supervisor.log.read_text())]
        assert len(pids) == 2
        supervisor.process.kill()
        supervisor.process.wait()
        eventually(lambda: supervisor.log.read_text().count("ended: drained") == 2, what="both to drain")
    assert supervisor.logged("has died, draining")


def test_separate_upkeep_promotes_for_workers_without_upkeep(shell: Shell) -> None:
    with shell.start("worker", "sample.py:app", "--no-upkeep") as worker, shell.start("upkeep", "sample.py") as upkeep:
        worker.wait_log("started")
        upkeep.wait_log("upkeep started")
        done = shell.run("submit", "--force", "add", "[1]", "--delay", "0.3", "--wait", "30")
        assert done.stdout == "2\n"
        assert upkeep.end() == 0
        assert worker.end() == 0


def test_upkeep_without_an_app_keeps_every_queue(shell: Shell) -> None:
    job_id = shell.run("submit", "--force", "add", "[1]", "--queue", "found", "--delay", "1").stdout.strip()
    with shell.start("upkeep") as upkeep:
        upkeep.wait_log("queues all")
        eventually(lambda: shell.json("queues", "list", "-q", "found")[0]["delayed"] == 0, what="promotion")
        assert upkeep.end() == 0
    assert shell.info(job_id, "found").state is State.QUEUED


def test_dev_prints_events(shell: Shell) -> None:
    process = subprocess.Popen(
        shell.command("dev", "sample.py"),
        cwd=shell.folder,
        env=shell.environment | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert shell.run("submit", "--force", "add", "[1]", "--wait", "30").stdout == "2\n"
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    assert "tasks: add, elsewhere, flaky, refuse, slow" in errors
    assert re.search(r"[0-9a-f]{32}  add +task.succeeded +attempt 1", out)


def test_ctrl_c_ends_a_watch_without_an_error(shell: Shell) -> None:
    shell.run("submit", "--force", "add", "[1]")
    process = subprocess.Popen(
        shell.command("jobs", "watch", "--interval", "0.1", "--json"),
        cwd=shell.folder,
        env=shell.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    assert errors == ""
    assert all(json.loads(line)["queues"] for line in [first, *out.splitlines()])


@pytest.mark.parametrize("words", [["worker", "nowhere:app"], ["dev", "nowhere.py"], ["upkeep", "sample:none"]])
def test_a_missing_app_is_exit_code_2(shell: Shell, words: list[str]) -> None:
    failed = shell.run(*words, code=2)
    assert "cannot load app" in failed.stderr
    assert "Traceback" not in failed.stderr


def test_a_worker_without_its_engine_is_exit_code_3(shell: Shell) -> None:
    failed = shell.run("worker", "sample.py:app", code=3, HOLDFAST_URL="redis://app:hunter2@127.0.0.1:1/0")
    assert "ENGINE_UNAVAILABLE" in failed.stderr
    assert "hunter2" not in failed.stderr
