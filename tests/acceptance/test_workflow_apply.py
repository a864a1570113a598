"""Source R's acceptance (requirement X2): the example `workflow_apply` on real Redis, PostgreSQL and a Mongo-protocol
server, with a fake model; every part is a separate process.

The tests share two deployments, which take longer to start than the tests run; each test has its own workflows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from secrets import token_hex
from typing import Any

import httpx
import pytest
import redis

from tests.acceptance.workflow_deployment import Stores, WorkflowDeployment, run_deployments, wait_until

#: The first test starts processes, which is slow on a busy machine.
pytestmark = [pytest.mark.redis, pytest.mark.postgres, pytest.mark.slow]


@pytest.fixture(scope="module")
def deployments(
    tmp_path_factory: pytest.TempPathFactory, redis_url: str, make_postgres_database: Callable[[], str]
) -> Iterator[dict[str, WorkflowDeployment]]:
    separate_stores, in_web_stores = (
        Stores(redis_url, make_postgres_database(), f"test-{token_hex(6)}") for _ in range(2)
    )
    # One job at a time, until an operator changes the concurrency.
    settings = {"HOLDFAST_BACKLOG_ALERT": "5", "HOLDFAST_CONCURRENCY": "1"}
    with run_deployments(tmp_path_factory.mktemp("workflows"), separate_stores, in_web_stores, **settings) as (
        separate,
        in_web,
    ):
        yield {"separate": separate, "in_web": in_web}


@pytest.fixture
def deployment(
    deployments: dict[str, WorkflowDeployment], request: pytest.FixtureRequest
) -> Iterator[WorkflowDeployment]:
    """A deployment with a worker; in a separate process by default."""
    kind: str = getattr(request, "param", "separate")
    chosen = deployments[kind]
    if kind == "separate":
        chosen.start_worker()
    chosen.wait_for_web()
    yield chosen
    chosen.model.open.set()
    chosen.print_logs()


def make_prompts(*numbers: int) -> list[str]:
    return [f"say {number}" for number in numbers]


def make_request(number: int) -> dict[str, str]:
    return {"workflow_id": f"w{number}", "stage_id": "draft", "prompt": f"say {number}", "user": "ada"}


def apply(http: httpx.Client, number: int, wait: float = 60) -> dict[str, Any]:
    response = http.post("/api/workflows/apply", json=make_request(number), params={"wait": wait})
    assert response.status_code in (200, 202), response.text
    result: dict[str, Any] = response.json()
    return result


def get_status(http: httpx.Client, job_id: str) -> str:
    state: str = http.get(f"/api/workflows/{job_id}").json()["status"]
    return state


def wait_state(http: httpx.Client, job_id: str, state: str) -> None:
    wait_until(lambda: get_status(http, job_id) == state, f"the job to be {state}")


def count_pending(deployment: WorkflowDeployment) -> int:
    """Count entries of the task streams that are waiting or in flight."""
    namespace = deployment.environment["HOLDFAST_NAMESPACE"]
    with redis.Redis.from_url(deployment.environment["HOLDFAST_URL"]) as client:
        streams = [key for key in client.scan_iter(f"{namespace}*task*") if client.type(key) == b"stream"]
        assert streams
        remaining = 0
        for stream in streams:
            remaining += client.xlen(stream)
            for group in client.xinfo_groups(stream):
                remaining += group["pending"]
        return remaining


@pytest.mark.parametrize(("deployment", "number"), [("in_web", 1), ("separate", 2)], indirect=["deployment"])
def test_1_a_workflow_succeeds(deployment: WorkflowDeployment, number: int) -> None:
    """Covers requirement H4 too: where the worker runs is a setting."""
    output = f"{number} yas"
    with deployment.caller() as http:
        done = apply(http, number)
        assert (done["status"], done["output"]) == ("succeeded", output)
        [document] = deployment.documents(f"w{number}")
        assert (document["output"], document["job_id"]) == (output, done["id"])
        # A repeated request returns the same result and does not run the workflow again.
        again = apply(http, number)
        assert (again["id"], again["output"], again["duplicate"]) == (done["id"], output, True)
        assert deployment.model.count_calls(make_prompts(number)) == 1
        assert len(deployment.documents(f"w{number}")) == 1
        assert http.get(f"/api/workflows/{done['id']}").json()["output"] == output
        assert http.get("/api/workflows/unknown").status_code == 404
        wait_until(lambda: count_pending(deployment) == 0, "nothing to be left pending")


def test_2_mongo_is_unreachable(deployment: WorkflowDeployment) -> None:
    with deployment.caller() as http, deployment.operator() as ops:
        deployment.mongo.kill()
        job_id = apply(http, 20, wait=0)["id"]
        # More attempts than retries: an outage uses up none.
        wait_until(lambda: ops.get(f"/api/v1/jobs/{job_id}?queue=workflows").json()["attempt"] >= 4, "four attempts")
        job = ops.get(f"/api/v1/jobs/{job_id}?queue=workflows").json()
        assert job["retry_count"] == 0
        assert job["error"] is None or job["error"]["code"] == "DEPENDENCY_UNAVAILABLE"
        assert get_status(http, job_id) in ("retrying", "running")
        deployment.mongo.start()
        wait_state(http, job_id, "succeeded")
        [document] = deployment.documents("w20")
        assert (document["output"], document["job_id"]) == ("02 yas", job_id)
        # The step was committed: the model is not called again.
        assert deployment.model.count_calls(make_prompts(20)) == 1


def test_3_three_failures_suspend_the_job_for_an_operator(deployment: WorkflowDeployment) -> None:
    with deployment.caller() as http, deployment.operator() as ops:
        deployment.model.statuses = [500] * 6
        first, second = apply(http, 30, wait=0)["id"], apply(http, 31, wait=0)["id"]
        for job_id in (first, second):
            wait_state(http, job_id, "suspended")
        assert deployment.model.count_calls(make_prompts(30, 31)) == 6
        suspended = wait_until(lambda: _suspended(ops, 2), "both jobs to be listed")
        assert {job["job_id"] for job in suspended} == {first, second}
        assert {job["task"] for job in suspended} == {"workflow.execute"}
        assert all("500" in job["error"] for job in suspended)
        # The history that an operator needs: every attempt with its error and stack.
        events = ops.get(f"/api/v1/jobs/{first}/events?queue=workflows").json()["events"]
        moves = [event["to_state"] for event in events if event["to_state"]]
        assert moves == ["queued", *["running", "retrying"] * 2, "running", "suspended"]
        resumed = ops.post(f"/internal/tasks/suspended/{first}/resume", json={"reason": "the model is back"})
        assert resumed.status_code == 200, resumed.text
        discarded = ops.post(
            "/internal/tasks/suspended/discard", json={"job_ids": [second], "reason": "no longer needed"}
        )
        assert discarded.status_code == 200, discarded.text
        wait_state(http, first, "succeeded")
        assert get_status(http, second) == "cancelled"
        wait_until(lambda: not _suspended(ops, 0), "nothing to be left suspended")
        # The ledger lags behind the engine.
        wait_until(lambda: "task.succeeded" in _list_event_types(ops, first), "the success in the ledger")
        wait_until(lambda: "task.cancelled" in _list_event_types(ops, second), "the cancellation in the ledger")
        ended = ops.get("/internal/tasks/stats").json()["states"]
        assert ended["succeeded"]
        assert ended["cancelled"] == 1
        log = ops.get("/api/v1/operator-log").json()["entries"]
        done = {(entry["type"], entry["actor"], entry["target_id"], entry["reason"]) for entry in log}
        assert ("operator.resume", "ops", first, "the model is back") in done
        assert ("operator.discard_suspended", "ops", second, "no longer needed") in done
    [document] = deployment.documents("w30", "w31")
    assert document["job_id"] == first


def test_4_a_worker_crashes(deployment: WorkflowDeployment) -> None:
    with deployment.caller() as http, deployment.operator() as ops:
        deployment.model.open.clear()
        job_id = apply(http, 40, wait=0)["id"]
        wait_until(lambda: deployment.model.count_calls(make_prompts(40)), "the run to start")
        deployment.kill_worker()
        deployment.model.open.set()
        assert get_status(http, job_id) == "running"
        deployment.start_worker()
        wait_state(http, job_id, "succeeded")
        [document] = deployment.documents("w40")
        assert (document["output"], document["job_id"]) == ("04 yas", job_id)
        claims = wait_until(lambda: _find_claims(ops, job_id), "the history in the ledger")
        # Reclaimed by the second worker, or by the upkeep in the web process, which released it to the second worker.
        assert [event["type"] for event in claims][:2] == ["task.claimed", "task.reclaimed"]
        assert claims[0]["worker"].startswith("worker-1")
        assert claims[-1]["worker"].startswith("worker-2")


def test_5_a_backlog_raises_an_alert_and_operators_can_limit_it(deployment: WorkflowDeployment) -> None:
    numbers = range(50, 58)
    with deployment.caller() as http, deployment.operator() as ops:
        deployment.model.open.clear()
        ids = [apply(http, number, wait=0)["id"] for number in numbers]
        [alert] = wait_until(lambda: _alerts(ops), "the alert")
        assert (alert["type"], alert["queue"]) == ("alert.backlog", "workflows")
        # One at a time, until an operator changes the concurrency: the running worker is notified.
        wait_until(lambda: deployment.model.count_calls(make_prompts(*numbers)) == 1, "the first run")
        changed = ops.post("/api/v1/queues/workflows/worker-concurrency", json={"value": 4, "reason": "backlog"})
        assert changed.status_code == 200, changed.text
        wait_until(lambda: deployment.model.count_calls(make_prompts(*numbers)) == 4, "four at a time")
        # Intake is paused until the backlog is done.
        ops.post("/api/v1/queues/workflows/intake/pause", json={"reason": "backlog"}).raise_for_status()
        refused = http.post("/api/workflows/apply", json=make_request(99))
        assert (refused.status_code, refused.json()["code"]) == (429, "INTAKE_REFUSED")
        assert refused.headers["retry-after"]
        deployment.model.open.set()
        for job_id in ids:
            wait_state(http, job_id, "succeeded")
        wait_until(lambda: len(_alerts(ops, "alert.backlog_cleared")) == 1, "the alert to end")
        ops.post("/api/v1/queues/workflows/intake/resume", json={"reason": "done"}).raise_for_status()
        assert apply(http, 99)["output"] == "99 yas"


def _suspended(ops: httpx.Client, count: int) -> list[dict[str, Any]]:
    response = ops.get("/internal/tasks/suspended")
    assert response.status_code == 200, response.text
    jobs: list[dict[str, Any]] = response.json()["jobs"]
    return jobs if len(jobs) >= count else []


def _list_event_types(ops: httpx.Client, job_id: str) -> list[str]:
    events = ops.get(f"/api/v1/jobs/{job_id}/events?queue=workflows").json()["events"]
    return [event["type"] for event in events]


def _find_claims(ops: httpx.Client, job_id: str) -> list[dict[str, Any]]:
    """Return the claims of the job in order, once its final event is in the ledger."""
    events = ops.get(f"/api/v1/jobs/{job_id}/events?queue=workflows").json()["events"]
    if not any(event["type"] == "task.succeeded" for event in events):
        return []
    return [event for event in events if event["type"] in ("task.claimed", "task.reclaimed")]


def _alerts(ops: httpx.Client, kind: str = "alert.backlog") -> list[dict[str, Any]]:
    response = ops.get("/api/v1/operator-log", params={"type": kind})
    assert response.status_code == 200, response.text
    entries: list[dict[str, Any]] = response.json()["entries"]
    return entries
