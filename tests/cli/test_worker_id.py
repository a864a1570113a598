"""`holdfast worker --id` as real processes: several with one id, a kill and a restart, a supervisor."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack

import pytest

from holdfast import State
from tests.cli.harness import TIMEOUT_S, Process, Shell, eventually

QUICK = {"HOLDFAST_HEARTBEAT_INTERVAL_S": "0.2"}
#: The defaults.
SLOW = {
    "HOLDFAST_VISIBILITY_TIMEOUT_S": "30",
    "HOLDFAST_HEARTBEAT_INTERVAL_S": "10",
    "HOLDFAST_RECLAIM_INTERVAL_S": "1",
}
MESSAGE = "another process has worker id web-0: "


def test_of_three_replicas_with_one_id_one_works_and_two_say_why_they_end(shell: Shell) -> None:
    with ExitStack() as stack:
        worker = ("worker", "sample.py:app", "--id", "web-0")
        replicas = [stack.enter_context(shell.start(*worker, **QUICK)) for _ in range(3)]
        eventually(lambda: len(_alive(replicas)) == 1, what="two replicas to end")
        (last,) = _alive(replicas)
        ended = [replica for replica in replicas if replica is not last]
        assert [replica.process.wait(TIMEOUT_S) for replica in ended] == [2, 2]
        for replica in ended:
            (error,) = [line for line in _log(replica) if line["level"].upper() == "ERROR"]
            assert error["message"].startswith(MESSAGE)
            assert "give each worker its own id" in error["message"]
        assert shell.run("submit", "--force", "add", "--arg", "a=40", "--arg", "b=2", "--wait", "30").stdout == "42\n"
        assert not last.logged(MESSAGE)
        # As when a process manager restarts them for ever.
        next_one = stack.enter_context(shell.start("worker", "sample.py:app", HOLDFAST_WORKER_ID="web-0", **QUICK))
        assert last.process.wait(TIMEOUT_S) == 2
        (finding,) = [each for each in shell.json("doctor")["findings"] if each["check"] == "worker id web-0"]
        assert (finding["ok"], finding["warning"]) == (False, True)
        assert "HOLDFAST_WORKER_ID" in finding["remedy"]
        assert next_one.end() == 0


def test_a_killed_worker_that_starts_again_runs_its_jobs_long_before_their_leases_expire(shell: Shell) -> None:
    with shell.start("worker", "sample.py:app", "--id", "web-0", **SLOW) as first:
        first.wait_log("started")
        job_id = shell.run("submit", "--force", "slow", "[0.5]").stdout.strip()
        shell.wait_begun(job_id)
        first.process.kill()
        began = time.monotonic()
        with shell.start("worker", "sample.py:app", "--id", "web-0", **SLOW) as second:
            info = shell.wait_state(job_id, State.SUCCEEDED)
            assert time.monotonic() - began < 15, "it waited for the lease of 30 s"
            assert info.attempt == 2
            assert second.end() == 0


def test_a_supervisor_numbers_its_processes_and_does_not_restart_replaced_ones(shell: Shell) -> None:
    both = ("worker", "sample.py:app", "--id", "web", "--processes", "2")
    with shell.start(*both, **QUICK) as first:
        eventually(lambda: {"web-0", "web-1"} <= _started(first), what="both processes to start")
        with shell.start(*both, **QUICK) as second:
            assert first.process.wait(TIMEOUT_S) == 2
            assert first.logged("worker process 0 is not restarted: another process has its id")
            eventually(lambda: {"web-0", "web-1"} <= _started(second), what="both processes to start")
            assert second.end() == 0


@pytest.mark.parametrize(("options", "variable"), [(("--id", "a b"), None), ((), "a b"), (("--id", ""), None)])
def test_an_id_that_cannot_be_used_is_refused_at_the_start(
    shell: Shell, options: tuple[str, ...], variable: str | None
) -> None:
    for more in ((), ("--processes", "2")) if options else ((),):
        variables = {} if variable is None else {"HOLDFAST_WORKER_ID": variable}
        done = shell.run("worker", "sample.py:app", *options, *more, code=2, **variables)
        assert "give each worker a different one of 1 to 128 characters" in done.stderr


def _alive(replicas: list[Process]) -> list[Process]:
    return [replica for replica in replicas if replica.process.poll() is None]


def _log(process: Process) -> list[dict[str, str]]:
    return [json.loads(line) for line in process.log.read_text().splitlines()]


def _started(process: Process) -> set[str]:
    """The labels of the workers that have logged their start."""
    started = (
        line["incarnation"] for line in _log(process) if line["message"].startswith("worker ") and "queues" in line
    )
    return {incarnation.partition("@")[0] for incarnation in started}
