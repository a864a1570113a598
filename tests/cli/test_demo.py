"""`holdfast demo` ends its workers when it is terminated, and its check can fail. tests/wheel tests its success."""

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
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads child processes from Linux's /proc")
def test_a_terminated_demo_ends_its_workers(tmp_path: Path, number: signal.Signals) -> None:
    def reset_signal() -> None:
        # A background job of a shell inherits ignored signals.
        signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)

    demo = subprocess.Popen(
        [sys.executable, "-m", "holdfast", "demo"],
        cwd=tmp_path,
        env=environment(tmp_path),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=reset_signal,
    )
    try:
        workers = eventually(lambda: pair if len(pair := children(demo.pid)) == 2 else [])
        demo.send_signal(number)
        _, errors = demo.communicate(timeout=100)
    finally:
        demo.kill()
        demo.wait()
    assert demo.returncode == 128 + number
    assert "Traceback" not in errors
    assert [worker for worker in workers if worker.is_running()] == []


def event(kind: str, at_ms: int = 10) -> Event:
    return Event(type=kind, job_id="j", at_ms=at_ms)


@pytest.mark.parametrize(
    ("changes", "kinds", "messages"),
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
def test_the_check_of_the_demo_can_fail(changes: dict[str, Any], kinds: list[str], messages: list[str]) -> None:
    from holdfast.demo.check import Expected, compare

    values: dict[str, Any] = {"state": State.SUCCEEDED, "attempt": 1} | changes
    info = JobInfo(
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
    _, problems = compare(job, info, [event(kind) for kind in kinds])
    assert len(problems) == len(messages)
    assert all(part in problem for part, problem in zip(messages, problems, strict=True))
    late = Expected("g", "j", "q", State.SUCCEEDED, not_before_ms=11)
    assert any("1 ms too early" in problem for problem in compare(late, info, [event("task.claimed")])[1])
    assert compare(job, None, [])[1] == ["the engine does not have it"]
