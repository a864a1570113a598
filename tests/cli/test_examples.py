"""The examples do what the README says."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast import State
from holdfast.core.job import EMPTY_META, Event, JobView
from tests.cli.harness import EXAMPLES, SOURCE, environment, eventually
from tests.processes import children


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_demo_ends_well(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "demo.py")],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every job ended exactly as it should" in done.stdout
    assert "lease lost" in done.stdout
    assert "WRONG" not in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for child processes in Linux's /proc")
def test_a_demo_that_is_ended_early_takes_its_workers_along(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "demo.py")]
    demo = subprocess.Popen(command, cwd=tmp_path, env=environment(tmp_path), stdout=subprocess.DEVNULL)
    try:
        workers = eventually(lambda: pair if len(pair := children(demo.pid)) == 2 else [])
        demo.terminate()
        assert demo.wait(100) == 128 + signal.SIGTERM
    finally:
        demo.kill()
        demo.wait()
    assert [worker for worker in workers if worker.is_running()] == []


def event(kind: str, at_ms: int = 10) -> Event:
    return Event(type=kind, job_id="j", at_ms=at_ms)


@pytest.mark.parametrize(
    ("changes", "kinds", "said"),
    [
        ({}, ["task.created", "task.claimed", "task.succeeded"], []),
        ({"state": State.FAILED}, ["task.created", "task.claimed", "task.failed"], ["saw failed, 1 run"]),
        ({"attempt": 2}, ["task.created", "task.claimed", "task.succeeded"], ["saw succeeded, 2 runs"]),
        ({}, ["task.created", "task.claimed", "task.succeeded", "task.succeeded"], ["2 final events"]),
        ({}, ["task.created", "task.claimed"], ["0 final events"]),
        ({}, ["task.created", "task.claimed", "task.reclaimed", "task.succeeded"], ["saw 2"]),
        ({}, ["task.created", "task.created", "task.claimed", "task.succeeded"], ["created exactly once"]),
    ],
)
def test_the_demo_s_reckoning_can_go_red(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], kinds: list[str], said: list[str]
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from demo_check import Expected, compare

    values: dict[str, Any] = {"state": State.SUCCEEDED, "attempt": 1} | changes
    view = JobView(
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
    assert compare(job, None, [])[1] == ["the engine does not know it"]


def test_the_quickstart(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "quickstart.py")],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.stdout == "order-7: 19.99 charged\n", done.stderr
    assert done.returncode == 0


def test_the_readme_has_the_quickstart() -> None:
    code = (EXAMPLES / "quickstart.py").read_text(encoding="utf-8").split('"""\n', 1)[1].strip()
    assert code in (SOURCE.parent / "README.md").read_text(encoding="utf-8")
