"""Source R's acceptance (requirement X2): the example `workflow_apply` on real Redis, PostgreSQL and a Mongo-protocol
server, with a stand-in for the model; every part a process of its own.

The tests share two deployments, which take longer to start than all that is done with them; each has workflows of its
own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from secrets import token_hex
from typing import Any

import httpx
import pytest
import redis

from tests.acceptance.workflow_deployment import Stores, World, deployed, until

#: Processes start in the first one, which takes a while on a busy machine.
pytestmark = [pytest.mark.redis, pytest.mark.postgres, pytest.mark.slow]


@pytest.fixture(scope="module")
def worlds(
    tmp_path_factory: pytest.TempPathFactory, redis_url: str, make_postgres_database: Callable[[], str]
) -> Iterator[dict[str, World]]:
    apart, together = (Stores(redis_url, make_postgres_database(), f"test-{token_hex(6)}") for _ in range(2))
    # One job at a time, until an operator says otherwise.
    settings = {"HOLDFAST_BACKLOG_ALERT": "5", "HOLDFAST_CONCURRENCY": "1"}
    with deployed(tmp_path_factory.mktemp("workflows"), apart, together, **settings) as (beside, inside):
        yield {"beside": beside, "inside": inside}


@pytest.fixture
def world(worlds: dict[str, World], request: pytest.FixtureRequest) -> Iterator[World]:
    """A deployment with a worker; beside the web process, unless the test says otherwise."""
    which: str = getattr(request, "param", "beside")
    chosen = worlds[which]
    if which == "beside":
        chosen.start_worker()
    chosen.wait_for_web()
    yield chosen
    chosen.model.open.set()
    chosen.print_logs()


def said(*numbers: int) -> list[str]:
    return [f"say {number}" for number in numbers]


def wanted(number: int) -> dict[str, str]:
    return {"workflow_id": f"w{number}", "stage_id": "draft", "prompt": f"say {number}", "user": "ada"}


def apply(http: httpx.Client, number: int, wait: float = 60) -> dict[str, Any]:
    answer = http.post("/api/workflows/apply", json=wanted(number), params={"wait": wait})
    assert answer.status_code in (200, 202), answer.text
    told: dict[str, Any] = answer.json()
    return told


def status(http: httpx.Client, job_id: str) -> str:
    told: str = http.get(f"/api/workflows/{job_id}").json()["status"]
    return told


def reach(http: httpx.Client, job_id: str, state: str) -> None:
    until(lambda: status(http, job_id) == state, f"the job to be {state}")


def pending(world: World) -> int:
    """Entries of the task streams that somebody holds or that wait."""
    namespace = world.environment["HOLDFAST_NAMESPACE"]
    with redis.Redis.from_url(world.environment["HOLDFAST_URL"]) as client:
        streams = [key for key in client.scan_iter(f"{namespace}*task*") if client.type(key) == b"stream"]
        assert streams
        left = 0
        for stream in streams:
            left += client.xlen(stream)
            for group in client.xinfo_groups(stream):
                left += group["pending"]
        return left


@pytest.mark.parametrize(("world", "number"), [("inside", 1), ("beside", 2)], indirect=["world"])
def test_1_all_well(world: World, number: int) -> None:
    """Requirement H4, too: where the worker runs is a setting."""
    output = f"{number} yas"
    with world.caller() as http:
        done = apply(http, number)
        assert (done["status"], done["output"]) == ("succeeded", output)
        [document] = world.documents(f"w{number}")
        assert (document["output"], document["job_id"]) == (output, done["id"])
        # The same again: the same answer, and nothing is done twice.
        again = apply(http, number)
        assert (again["id"], again["output"], again["duplicate"]) == (done["id"], output, True)
        assert world.model.asked(said(number)) == 1
        assert len(world.documents(f"w{number}")) == 1
        assert http.get(f"/api/workflows/{done['id']}").json()["output"] == output
        assert http.get("/api/workflows/unknown").status_code == 404
        until(lambda: pending(world) == 0, "nothing to be left pending")


def test_2_mongo_is_down(world: World) -> None:
    with world.caller() as http, world.operator() as ops:
        world.mongo.kill()
        job_id = apply(http, 20, wait=0)["id"]
        # More often than there are retries: an outage uses up none.
        until(lambda: ops.get(f"/api/v1/jobs/{job_id}?queue=workflows").json()["attempt"] >= 4, "four attempts")
        job = ops.get(f"/api/v1/jobs/{job_id}?queue=workflows").json()
        assert job["retry_count"] == 0
        assert job["error"] is None or job["error"]["code"] == "DEPENDENCY_UNAVAILABLE"
        assert status(http, job_id) in ("retrying", "running")
        world.mongo.start()
        reach(http, job_id, "succeeded")
        [document] = world.documents("w20")
        assert (document["output"], document["job_id"]) == ("02 yas", job_id)
        # The step had committed: the model was not asked again.
        assert world.model.asked(said(20)) == 1


def test_3_three_failures_are_an_operators_to_decide(world: World) -> None:
    with world.caller() as http, world.operator() as ops:
        world.model.statuses = [500] * 6
        first, second = apply(http, 30, wait=0)["id"], apply(http, 31, wait=0)["id"]
        for job_id in (first, second):
            reach(http, job_id, "suspended")
        assert world.model.asked(said(30, 31)) == 6
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
        dropped = ops.post("/internal/tasks/suspended/discard", json={"job_ids": [second], "reason": "nobody needs it"})
        assert dropped.status_code == 200, dropped.text
        reach(http, first, "succeeded")
        assert status(http, second) == "cancelled"
        until(lambda: not _suspended(ops, 0), "nothing to be left suspended")
        # From the ledger, which is a moment behind.
        until(lambda: "task.succeeded" in _story(ops, first), "the one end in the ledger")
        until(lambda: "task.cancelled" in _story(ops, second), "the other end in the ledger")
        ended = ops.get("/internal/tasks/stats").json()["states"]
        assert ended["succeeded"]
        assert ended["cancelled"] == 1
        log = ops.get("/api/v1/operator-log").json()["entries"]
        done = {(line["type"], line["actor"], line["target_id"], line["reason"]) for line in log}
        assert ("operator.resume", "ops", first, "the model is back") in done
        assert ("operator.discard_suspended", "ops", second, "nobody needs it") in done
    [document] = world.documents("w30", "w31")
    assert document["job_id"] == first


def test_4_a_worker_crashes(world: World) -> None:
    with world.caller() as http, world.operator() as ops:
        world.model.open.clear()
        job_id = apply(http, 40, wait=0)["id"]
        until(lambda: world.model.asked(said(40)), "the run to be in the middle")
        world.kill_worker()
        world.model.open.set()
        assert status(http, job_id) == "running"
        world.start_worker()
        reach(http, job_id, "succeeded")
        [document] = world.documents("w40")
        assert (document["output"], document["job_id"]) == ("04 yas", job_id)
        taken = until(lambda: _taken(ops, job_id), "the story in the ledger")
        # Whoever noticed first took it over: the heir, or the upkeep in the web process, which gave it to the heir.
        assert [event["type"] for event in taken][:2] == ["task.claimed", "task.reclaimed"]
        assert taken[0]["worker"].startswith("worker-1")
        assert taken[-1]["worker"].startswith("worker-2")


def test_5_a_backlog_is_told_and_operators_have_levers(world: World) -> None:
    numbers = range(50, 58)
    with world.caller() as http, world.operator() as ops:
        world.model.open.clear()
        ids = [apply(http, number, wait=0)["id"] for number in numbers]
        [alert] = until(lambda: _alerts(ops), "the alert")
        assert (alert["type"], alert["queue"]) == ("alert.backlog", "workflows")
        # One at a time, until an operator says otherwise: the worker hears of it while it runs.
        until(lambda: world.model.asked(said(*numbers)) == 1, "the first run")
        lever = ops.post("/api/v1/queues/workflows/concurrency", json={"value": 4, "reason": "backlog"})
        assert lever.status_code == 200, lever.text
        until(lambda: world.model.asked(said(*numbers)) == 4, "four at a time")
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


def _story(ops: httpx.Client, job_id: str) -> list[str]:
    events = ops.get(f"/api/v1/jobs/{job_id}/events?queue=workflows").json()["events"]
    return [event["type"] for event in events]


def _taken(ops: httpx.Client, job_id: str) -> list[dict[str, Any]]:
    """Who had the job, one after the other, once its end is in the ledger."""
    events = ops.get(f"/api/v1/jobs/{job_id}/events?queue=workflows").json()["events"]
    if not any(event["type"] == "task.succeeded" for event in events):
        return []
    return [event for event in events if event["type"] in ("task.claimed", "task.reclaimed")]


def _alerts(ops: httpx.Client, kind: str = "alert.backlog") -> list[dict[str, Any]]:
    answer = ops.get("/api/v1/operator-log", params={"type": kind})
    assert answer.status_code == 200, answer.text
    entries: list[dict[str, Any]] = answer.json()["entries"]
    return entries
