"""Source R's acceptance (requirement X2): the example `workflow_apply` on real Redis, PostgreSQL and a Mongo-protocol
server, with a stand-in for the model; every part a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from tests.acceptance.workflow_world import deployed, until

#: Each starts processes of its own, which takes a while on a busy machine.
pytestmark = [pytest.mark.redis, pytest.mark.postgres, pytest.mark.slow, pytest.mark.timeout(240)]


def wanted(number: int = 1) -> dict[str, str]:
    return {"workflow_id": f"w{number}", "stage_id": "draft", "prompt": f"say {number}", "user": "ada"}


def apply(http: httpx.Client, number: int = 1, wait: float = 60) -> dict[str, Any]:
    answer = http.post("/api/workflows/apply", json=wanted(number), params={"wait": wait})
    assert answer.status_code in (200, 202), answer.text
    told: dict[str, Any] = answer.json()
    return told


def status(http: httpx.Client, job_id: str) -> str:
    told: str = http.get(f"/api/workflows/{job_id}").json()["status"]
    return told


def reach(http: httpx.Client, job_id: str, state: str) -> None:
    until(lambda: status(http, job_id) == state, f"the job to be {state}")


def pending(url: str, namespace: str) -> int:
    """Entries of the task streams that somebody holds or that wait."""
    with redis.Redis.from_url(url) as client:
        streams = [key for key in client.scan_iter(f"{namespace}*task*") if client.type(key) == b"stream"]
        assert streams
        left = 0
        for stream in streams:
            left += client.xlen(stream)
            for group in client.xinfo_groups(stream):
                left += group["pending"]
        return left


@pytest.mark.parametrize("inside", [True, False], ids=["worker-in-the-web-process", "worker-beside-it"])
def test_1_all_well(tmp_path: Path, redis_url: str, postgres_url: str, namespace: str, inside: bool) -> None:
    """Requirement H4, too: where the worker runs is a setting."""
    settings = {"HOLDFAST_HTTP_WORKER": str(inside).lower()}
    with deployed(tmp_path, redis_url, postgres_url, namespace, **settings) as world, world.caller() as http:
        if not inside:
            world.start_worker()
        done = apply(http)
        assert (done["status"], done["output"]) == ("succeeded", "1 yas")
        [document] = world.documents()
        assert (document["workflow_id"], document["output"], document["job_id"]) == ("w1", "1 yas", done["id"])
        # The same again: the same answer, and nothing is done twice.
        again = apply(http)
        assert (again["id"], again["output"], again["duplicate"]) == (done["id"], "1 yas", True)
        assert world.model.prompts == ["say 1"]
        assert len(world.documents()) == 1
        assert http.get(f"/api/workflows/{done['id']}").json()["output"] == "1 yas"
        assert http.get("/api/workflows/unknown").status_code == 404
        until(lambda: pending(redis_url, namespace) == 0, "nothing to be left pending")


def test_2_mongo_is_down(tmp_path: Path, redis_url: str, postgres_url: str, namespace: str) -> None:
    with deployed(tmp_path, redis_url, postgres_url, namespace) as world, world.caller() as http:
        world.start_worker()
        world.mongo.kill()
        job_id = apply(http, wait=0)["id"]
        with world.operator() as ops:
            # Longer than any number of retries would last: an outage uses up none.
            until(lambda: ops.get(f"/api/v1/jobs/{job_id}?queue=workflows").json()["attempt"] >= 5, "five attempts")
            job = ops.get(f"/api/v1/jobs/{job_id}?queue=workflows").json()
        assert job["retry_count"] == 0
        assert job["error"] is None or job["error"]["code"] == "DEPENDENCY_UNAVAILABLE"
        assert status(http, job_id) in ("retrying", "running")
        world.mongo.start()
        reach(http, job_id, "succeeded")
        [document] = world.documents()
        assert (document["output"], document["job_id"]) == ("1 yas", job_id)
        # The step had committed: the model was not asked again.
        assert world.model.prompts == ["say 1"]


def test_3_three_failures_are_an_operators_to_decide(
    tmp_path: Path, redis_url: str, postgres_url: str, namespace: str
) -> None:
    with deployed(tmp_path, redis_url, postgres_url, namespace) as world, world.caller() as http:
        world.start_worker()
        world.model.statuses = [500] * 6
        first, second = apply(http, 1, wait=0)["id"], apply(http, 2, wait=0)["id"]
        for job_id in (first, second):
            reach(http, job_id, "suspended")
        assert len(world.model.prompts) == 6
        with world.operator() as ops:
            seen = until(lambda: _suspended(ops, 2), "both to be seen")
            assert {job["job_id"] for job in seen} == {first, second}
            assert {job["task"] for job in seen} == {"workflow.execute"}
            assert all("500" in job["error"] for job in seen)
            # Background that an operator needs: every attempt with its error and stack.
            story = ops.get(f"/api/v1/jobs/{first}/events?queue=workflows").json()["events"]
            moves = [event["to_state"] for event in story if event["to_state"]]
            assert moves == ["queued", *["running", "retrying"] * 2, "running", "suspended"]
            resumed = ops.post(f"/internal/tasks/suspended/{first}/resume", json={"reason": "the model is back"})
            assert resumed.status_code == 200, resumed.text
            dropped = ops.post(
                "/internal/tasks/suspended/discard", json={"job_ids": [second], "reason": "nobody needs it"}
            )
            assert dropped.status_code == 200, dropped.text
            reach(http, first, "succeeded")
            assert status(http, second) == "cancelled"
            until(lambda: not _suspended(ops, 0), "nothing to be left suspended")
            # From the ledger, which is a moment behind.
            until(lambda: _ended(ops) == {"succeeded": 1, "cancelled": 1}, "both ends in the ledger")
            log = ops.get("/api/v1/operator-log").json()["lines"]
            done = {(line["type"], line["actor"], line["target_id"], line["reason"]) for line in log}
            assert ("operator.resume", "ops", first, "the model is back") in done
            assert ("operator.discard_suspended", "ops", second, "nobody needs it") in done
        [document] = world.documents()
        assert document["job_id"] == first


def test_4_a_worker_crashes(tmp_path: Path, redis_url: str, postgres_url: str, namespace: str) -> None:
    with deployed(tmp_path, redis_url, postgres_url, namespace) as world, world.caller() as http:
        world.model.open.clear()
        doomed = world.start_worker("doomed")
        job_id = apply(http, wait=0)["id"]
        until(lambda: world.model.prompts, "the run to be in the middle")
        doomed.kill()
        doomed.wait()
        world.model.open.set()
        assert status(http, job_id) == "running"
        world.start_worker("heir")
        reach(http, job_id, "succeeded")
        [document] = world.documents()
        assert (document["output"], document["job_id"]) == ("1 yas", job_id)
        with world.operator() as ops:
            taken = until(lambda: _taken(ops, job_id), "the story in the ledger")
        # Whoever noticed first took it over: the heir, or the upkeep in the web process, which gave it to the heir.
        assert [event["type"] for event in taken][:2] == ["task.claimed", "task.reclaimed"]
        assert taken[0]["worker"].startswith("doomed")
        assert taken[-1]["worker"].startswith("heir")


def test_5_a_backlog_is_told_and_operators_have_levers(
    tmp_path: Path, redis_url: str, postgres_url: str, namespace: str
) -> None:
    settings = {"HOLDFAST_BACKLOG_ALERT": "5", "HOLDFAST_CONCURRENCY": "1"}
    with deployed(tmp_path, redis_url, postgres_url, namespace, **settings) as world, world.caller() as http:
        world.model.open.clear()
        world.start_worker()
        ids = [apply(http, number, wait=0)["id"] for number in range(8)]
        with world.operator() as ops:
            [alert] = until(lambda: _alerts(ops), "the alert")
            assert (alert["type"], alert["queue"]) == ("alert.backlog", "workflows")
            # One at a time, until an operator says otherwise: the worker hears of it while it runs.
            until(lambda: len(world.model.prompts) == 1, "the first run")
            lever = ops.post("/api/v1/queues/workflows/concurrency", json={"value": 4, "reason": "backlog"})
            assert lever.status_code == 200, lever.text
            until(lambda: len(world.model.prompts) == 4, "four at a time")
            # And the door is closed until it is worked off.
            ops.post("/api/v1/queues/workflows/intake/pause", json={"reason": "backlog"}).raise_for_status()
            closed = http.post("/api/workflows/apply", json=wanted(99))
            assert (closed.status_code, closed.json()["code"]) == (429, "INTAKE_REFUSED")
            assert closed.headers["retry-after"]
            world.model.open.set()
            for job_id in ids:
                reach(http, job_id, "succeeded")
            until(lambda: len(_alerts(ops, "alert.backlog_cleared")) == 1, "the alert to end")
            ops.post("/api/v1/queues/workflows/intake/resume", json={"reason": "done"}).raise_for_status()
            assert apply(http, 99)["output"] == "99 yas"


def _suspended(ops: httpx.Client, count: int) -> list[dict[str, Any]]:
    answer = ops.get("/internal/tasks/suspended")
    assert answer.status_code == 200, answer.text
    jobs: list[dict[str, Any]] = answer.json()["jobs"]
    return jobs if len(jobs) >= count else []


def _ended(ops: httpx.Client) -> dict[str, int]:
    states = ops.get("/internal/tasks/stats").json()["states"]
    return {state: count for state, count in states.items() if count}


def _taken(ops: httpx.Client, job_id: str) -> list[dict[str, Any]]:
    """Who had the job, one after the other, once its end is in the ledger."""
    events = ops.get(f"/api/v1/jobs/{job_id}/events?queue=workflows").json()["events"]
    if not any(event["type"] == "task.succeeded" for event in events):
        return []
    return [event for event in events if event["type"] in ("task.claimed", "task.reclaimed")]


def _alerts(ops: httpx.Client, kind: str = "alert.backlog") -> list[dict[str, Any]]:
    answer = ops.get("/api/v1/operator-log", params={"type": kind})
    assert answer.status_code == 200, answer.text
    lines: list[dict[str, Any]] = answer.json()["lines"]
    return lines
