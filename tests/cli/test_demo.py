"""`holdfast demo` takes its workers along when it is ended, and can go red. That it ends well is in tests/wheel."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast import State
from holdfast.core.job import EMPTY_META, Event, JobInfo
from tests.cli.harness import environment, eventually
from tests.processes import children


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for child processes in Linux's /proc")
def test_a_demo_that_is_ended_early_takes_its_workers_along(tmp_path: Path, number: signal.Signals) -> None:
    def hears() -> None:
        # A shell's background job inherits that some are ignored.
        signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)

    demo = subprocess.Popen(
        [sys.executable, "-m", "holdfast", "demo"],
        cwd=tmp_path,
        env=environment(tmp_path),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hears,
    )
    try:
        workers = eventually(lambda: pair if len(pair := children(demo.pid)) == 2 else [])
        demo.send_signal(number)
        _, said = demo.communicate(timeout=100)
    finally:
        demo.kill()
        demo.wait()
    assert demo.returncode == 128 + number
    assert "Traceback" not in said
    assert [worker for worker in workers if worker.is_running()] == []


def event(kind: str, at_ms: int = 10) -> Event:
    return Event(type=kind, job_id="j", at_ms=at_ms)


@pytest.mark.parametrize(
    ("changes", "kinds", "said"),
    [
        ({}, ["task.created", "task.claimed", "task.succeeded"], []),
        ({"state": State.FAILED}, ["task.created", "task.claimed", "task.failed"], ["observed failed, 1 run"]),
        ({"attempt": 2}, ["task.created", "task.claimed", "task.succeeded"], ["observed succeeded, 2 runs"]),
        ({}, ["task.created", "task.claimed", "task.succeeded", "task.succeeded"], ["2 final events"]),
        ({}, ["task.created", "task.claimed"], ["0 final events"]),
        ({}, ["task.created", "task.claimed", "task.reclaimed", "task.succeeded"], ["observed 2"]),
        ({}, ["task.created", "task.created", "task.claimed", "task.succeeded"], ["created exactly once"]),
    ],
)
def test_the_demo_s_reckoning_can_go_red(changes: dict[str, Any], kinds: list[str], said: list[str]) -> None:
    from holdfast.demo.check import Expected, compare

    values: dict[str, Any] = {"state": State.SUCCEEDED, "attempt": 1} | changes
    view = JobInfo(
        job_id="j",
        task="t",
        queue="q",
        tenant_id="default",
        payload=b"{}",
        idempotency_key="",
        trace_id="",
        meta=EMPTY_META,
        created_at_ms=1,
        **values,
    )
    job = Expected("g", "j", "q", State.SUCCEEDED)
    _, complaints = compare(job, view, [event(kind) for kind in kinds])
    assert len(complaints) == len(said)
    assert all(part in complaint for part, complaint in zip(said, complaints, strict=True))
    late = Expected("g", "j", "q", State.SUCCEEDED, not_before_ms=11)
    assert any("1 ms too early" in complaint for complaint in compare(late, view, [event("task.claimed")])[1])
    assert compare(job, None, [])[1] == ["the engine does not have it"]
