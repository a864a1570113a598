"""Jobs over HTTP: submit, wait, bulk, list, events, cancel, retry, run (requirements H1, H3, H7)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import msgspec
import pytest

from holdfast.client.submitter import BatchingSubmitter
from holdfast.core.job import JobInfo
from holdfast.core.principal import Role
from holdfast.core.verdict import Settlement, Succeed
from holdfast.engine.port.operators import QueueControl, TenantControl
from holdfast.errors import EngineUnavailable, LedgerUnavailable
from tests.cli.harness import eventually
from tests.http.deployment import Deployment, sample, serving


def _submit(client: httpx.Client, task: str = "add", payload: Any = None, **more: Any) -> str:
    body = {"task": task, "payload": {"a": 1} if payload is None else payload} | more
    reply = client.post("/api/v1/jobs", json=body)
    assert reply.status_code == 202, reply.text
    job_id: str = reply.json()["job_id"]
    return job_id


def test_a_submitted_job_can_be_read(deployment: Deployment) -> None:
    client = deployment.client("ada")
    reply = client.post("/api/v1/jobs", json={"task": "add", "payload": {"a": 1}})
    assert reply.status_code == 202
    job = client.get(reply.headers["location"]).json()
    assert (job["job_id"], job["state"], job["payload"]) == (reply.json()["job_id"], "queued", {"a": 1})
    assert job["submitted_by"] == "ada"


def test_a_prefix_of_an_id_is_not_an_id(deployment: Deployment) -> None:
    client = deployment.client()
    job_id = _submit(client)
    assert client.get(f"/api/v1/jobs/{job_id}").status_code == 200
    for path in (f"/api/v1/jobs/{job_id[:-1]}", f"/api/v1/jobs/{job_id[:12]}"):
        assert client.get(path).status_code == 404
        assert client.post(f"{path}/cancel", json={"reason": "x"}).status_code == 404
    assert client.get(f"/api/v1/jobs/{job_id}").json()["state"] == "queued"


def test_waiting_returns_the_result(working: Deployment) -> None:
    reply = working.client().post("/api/v1/jobs?wait=20", json={"task": "add", "payload": {"a": 1, "b": 2}})
    assert (reply.status_code, reply.json()["state"], reply.json()["result"]) == (200, "succeeded", 3)


def test_waiting_for_a_job_that_fails_returns_its_error(working: Deployment) -> None:
    reply = working.client().post("/api/v1/jobs?wait=20", json={"task": "refuse", "payload": {"reason": "never"}})
    assert (reply.status_code, reply.json()["state"]) == (200, "failed")
    assert (reply.json()["error"]["code"], reply.json()["error"]["message"]) == ("TASK_FATAL", "never")


def test_a_finished_job_has_its_arguments(on_all_stores: Deployment) -> None:
    client, payload = on_all_stores.client(), {"a": 1, "b": 2}
    body = {"task": "add", "payload": payload}
    headers = {"Idempotency-Key": "sum"}
    ended = client.post("/api/v1/jobs?wait=20", json=body, headers=headers).json()
    assert (ended["state"], ended["payload"]) == ("succeeded", payload)

    def read() -> Any:
        """The ledger may be behind for a moment."""
        return client.get(f"/api/v1/jobs/{ended['job_id']}").json()["payload"]

    eventually(read, what="the arguments")
    assert read() == payload
    again = client.post("/api/v1/jobs?wait=20", json=body, headers=headers).json()
    assert (again["job_id"], again["payload"]) == (ended["job_id"], payload)


def test_a_wait_that_times_out_is_a_202_with_the_location(deployment: Deployment) -> None:
    reply = deployment.client().post("/api/v1/jobs?wait=0.1", json={"task": "add", "payload": {"a": 1}})
    assert reply.status_code == 202
    assert reply.headers["location"].endswith(reply.json()["job_id"])


@pytest.mark.parametrize("end", [None, EngineUnavailable("stopped"), LedgerUnavailable("stopped")])
def test_a_wait_ends_if_nothing_is_known_of_the_job(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, end: Exception | None
) -> None:
    """It was accepted, so the answer is where to ask for it: no error, and no busy loop."""
    calls = 0

    async def wait_final(self: BatchingSubmitter, queue: str, job_id: str, wait_ms: int) -> None:
        nonlocal calls
        calls += 1
        if end is not None:
            raise end

    monkeypatch.setattr(BatchingSubmitter, "wait_final", wait_final)
    reply = deployment.client().post("/api/v1/jobs?wait=20", json={"task": "add", "payload": {"a": 1}})
    assert (reply.status_code, calls) == (202, 1)
    assert reply.headers["location"].endswith(reply.json()["job_id"])


def test_a_wait_does_not_show_the_job_of_another_tenant(working: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    wait_final = BatchingSubmitter.wait_final

    async def of_another_tenant(self: BatchingSubmitter, queue: str, job_id: str, wait_ms: int) -> JobInfo | None:
        view = await wait_final(self, queue, job_id, wait_ms)
        return None if view is None else msgspec.structs.replace(view, tenant_id="zeta")

    monkeypatch.setattr(BatchingSubmitter, "wait_final", of_another_tenant)
    reply = working.client().post("/api/v1/jobs?wait=20", json={"task": "add", "payload": {"a": 1, "b": 2}})
    assert (reply.status_code, set(reply.json())) == (202, {"job_id", "queue", "duplicate", "location"})


def test_a_second_submission_with_the_key_is_the_first_job(deployment: Deployment) -> None:
    client, body = deployment.client(), {"task": "add", "payload": {"a": 1}}
    first = client.post("/api/v1/jobs", json=body, headers={"Idempotency-Key": "order-17"}).json()
    second = client.post("/api/v1/jobs", json=body, headers={"Idempotency-Key": "order-17"}).json()
    assert (second["job_id"], second["duplicate"]) == (first["job_id"], True)


def test_a_bulk_submission_keeps_its_order(deployment: Deployment) -> None:
    jobs = [{"task": "add", "payload": {"a": number}, "idempotency_key": f"n-{number}"} for number in range(50)]
    response = deployment.client().post("/api/v1/jobs/bulk", json={"jobs": jobs}).json()
    assert (response["accepted"], response["refused"]) == (50, 0)
    job = deployment.client().get(f"/api/v1/jobs/{response['results'][7]['job_id']}").json()
    assert job["payload"] == {"a": 7}


def test_one_bad_item_refuses_the_request_before_anything_is_submitted(deployment: Deployment) -> None:
    client = deployment.client()
    jobs = [{"task": "add", "payload": {"a": 1}}, {"task": "add", "payload": {"b": "x"}}]
    reply = client.post("/api/v1/jobs/bulk", json={"jobs": jobs})
    assert (reply.status_code, reply.json()["code"]) == (422, "INVALID_PAYLOAD")
    assert "jobs[1]" in reply.json()["detail"]
    assert client.get("/api/v1/jobs").json()["jobs"] == []


def test_lists_are_filtered_and_paged(deployment: Deployment) -> None:
    client = deployment.client()
    submitted = [_submit(client, tenant_id="acme") for _ in range(5)]
    _submit(client, "refuse", {})
    listed: list[str] = []
    cursor = ""
    while True:
        page = client.get(f"/api/v1/jobs?task=add&tenant_id=acme&limit=2{cursor}").json()
        listed += [job["job_id"] for job in page["jobs"]]
        if page["cursor"] is None:
            break
        cursor = f"&cursor={page['cursor']}"
    assert sorted(listed) == sorted(submitted)
    assert len(client.get("/api/v1/jobs?state=cancelled").json()["jobs"]) == 0


def test_the_history_of_a_job(deployment: Deployment) -> None:
    client = deployment.client()
    job_id = _submit(client)
    client.post(f"/api/v1/jobs/{job_id}/cancel", json={"reason": "not needed"})
    events = client.get(f"/api/v1/jobs/{job_id}/events").json()["events"]
    assert [event["type"] for event in events] == ["task.created", "task.cancelled"]
    (entry,) = client.get(f"/api/v1/operator-log?target_id={job_id}").json()["entries"]
    assert (entry["type"], entry["actor"], entry["reason"]) == ("operator.cancel", "ada", "not needed")
    assert "queued" in str(entry["before"])
    assert "cancelled" in str(entry["after"])


def test_retry_now_makes_a_delayed_job_due(deployment: Deployment) -> None:
    client = deployment.client()
    job_id = _submit(client, delay_s=3_600)
    before = client.get(f"/api/v1/jobs/{job_id}").json()["next_attempt_at"]
    after = client.post(f"/api/v1/jobs/{job_id}/retry", json={"reason": "now"}).json()["next_attempt_at"]
    assert after is None or after < before


def test_of_two_concurrent_moves_one_succeeds(deployment: Deployment) -> None:
    """The other one gets a 409 with the stable code."""
    job_id = _submit(deployment.client())
    clients = [deployment.client(name) for name in ("ada", "bob")]
    with ThreadPoolExecutor(2) as pool:
        replies = list(
            pool.map(lambda client: client.post(f"/api/v1/jobs/{job_id}/cancel", json={"reason": "me"}), clients)
        )
    assert sorted(reply.status_code for reply in replies) == [200, 409]
    (conflict,) = (reply for reply in replies if reply.status_code == 409)
    assert conflict.json()["code"] == "WF_STATE_TRANSITION_INVALID"


# The run endpoint (requirement H3) ---------------------------------------------------------------------


def _run(client: httpx.Client, job_id: str, query: str = "") -> httpx.Response:
    return client.post(f"/api/v1/internal/jobs/{job_id}/run{query}")


def test_run_does_not_exceed_the_concurrency_of_the_queue(deployment: Deployment) -> None:
    client = deployment.client()
    running, waiting = _submit(client), _submit(client)
    client.post("/api/v1/queues/default/concurrency", json={"value": 1, "reason": "busy"}).raise_for_status()
    engine = deployment.service.operations.engine
    claim = deployment.call(lambda: engine.claim_job("w1", "default", running))
    reply = _run(client, waiting)
    assert (reply.status_code, reply.json()["code"]) == (409, "CONCURRENCY_LIMITED")
    assert client.get(f"/api/v1/jobs/{waiting}").json()["state"] == "queued"
    deployment.call(lambda: engine.settle([Settlement(claim, Succeed(b"1"), claim.claimed_at_ms)]))
    assert _run(client, waiting).json()["state"] == "succeeded"


def test_run_succeeds_and_a_second_run_is_an_illegal_move(deployment: Deployment) -> None:
    client = deployment.client()
    job_id = _submit(client, payload={"a": 2, "b": 3}, delay_s=600)
    first = _run(client, job_id)
    assert (first.status_code, first.json()["state"], first.json()["result"]) == (200, "succeeded", 5)
    second = _run(client, job_id)
    assert (second.status_code, second.json()["code"]) == (409, "WF_STATE_TRANSITION_INVALID")


def test_run_with_transient_failures(deployment: Deployment) -> None:
    """Calls 1 to 3 are retried, call 4 is dead-lettered; each is in the history."""
    client = deployment.client()
    job_id = _submit(client)
    ended = [_run(client, job_id, "?transient_fail=true").json() for _ in range(4)]
    assert [(job["state"], job["retry_count"]) for job in ended] == [
        ("retrying", 1),
        ("retrying", 2),
        ("retrying", 3),
        ("failed", 3),
    ]
    assert ended[-1]["dlq_id"]
    events = client.get(f"/api/v1/jobs/{job_id}/events").json()["events"]
    assert [event["to_state"] for event in events][-3:] == ["dlq_pending", "dlq_recorded", "failed"]


def test_run_with_a_forced_failure_dead_letters_at_once(deployment: Deployment) -> None:
    client = deployment.client()
    job_id = _submit(client)
    ended = _run(client, job_id, "?force_fail=true").json()
    assert (ended["state"], ended["retry_count"], ended["attempt"]) == ("failed", 0, 1)


def test_run_is_not_found_unless_it_is_enabled(tmp_path: Any) -> None:
    with serving(sample(f"sqlite:///{tmp_path / 'jobs.db'}"), upkeep=False) as deployment:
        client = deployment.client()
        assert _run(client, _submit(client)).status_code == 404


# Queues and stats --------------------------------------------------------------------------------------


def test_a_paused_intake_is_a_429_with_retry_after(deployment: Deployment) -> None:
    client = deployment.client()
    client.post("/api/v1/queues/default/intake/pause", json={"reason": "full"})
    reply = client.post("/api/v1/jobs", json={"task": "add", "payload": {"a": 1}})
    assert (reply.status_code, reply.json()["code"]) == (429, "INTAKE_REFUSED")
    assert int(reply.headers["retry-after"]) >= 1


def test_an_intake_limit_is_a_429(deployment: Deployment) -> None:
    client = deployment.client()
    client.post("/api/v1/queues/default/intake/limit", json={"reason": "enough", "value": 1})
    _submit(client)
    reply = client.post("/api/v1/jobs", json={"task": "add", "payload": {"a": 1}})
    assert (reply.status_code, reply.json()["code"]) == (429, "INTAKE_LIMITED")


def test_controls_and_stats(deployment: Deployment) -> None:
    client = deployment.client()
    _submit(client)
    assert client.post("/api/v1/queues/default/concurrency", json={"reason": "slow", "value": 3}).status_code == 200
    path, request = "/api/v1/queues/default/worker-concurrency", {"reason": "fast", "value": 9}
    assert client.post(path, json=request).json()["worker_concurrency"] == 9
    (queue,) = client.get("/api/v1/queues").json()["queues"]
    assert (queue["states"]["queued"], queue["states"]["running"]) == (1, 0)
    assert (queue["control"]["concurrency"], queue["control"]["worker_concurrency"]) == (3, 9)
    stats = client.get("/internal/tasks/stats").json()
    assert (stats["states"]["queued"], len(stats["latest"])) == (1, 1)


@pytest.mark.parametrize("path", ["/api/v1/suspended", "/internal/tasks/suspended"])
def test_suspended_jobs_are_resumed_and_discarded(deployment: Deployment, path: str) -> None:
    client = deployment.client()
    jobs = [_submit(client, "park", {}) for _ in range(3)]
    for job_id in jobs:
        assert _run(client, job_id).json()["state"] == "suspended"
    assert len(client.get(path).json()["jobs"]) == 3
    assert client.post(f"{path}/{jobs[0]}/resume", json={"reason": "again"}).status_code == 200
    assert client.get(f"/api/v1/jobs/{jobs[0]}").json()["state"] == "queued"
    counted = client.post(f"{path}/discard", json={"reason": "old", "dry_run": True}).json()
    assert (counted["matched"], counted["done"]) == (2, 0)
    done = client.post(f"{path}/discard", json={"reason": "old", "job_ids": jobs[1:]}).json()
    assert done["done"] == 2
    assert client.get(f"/api/v1/jobs/{jobs[1]}").json()["state"] == "cancelled"


def test_metrics_need_access_to_all_tenants(deployment: Deployment) -> None:
    assert deployment.client().get("/metrics").status_code == 200
    assert deployment.client("eve", Role.VIEWER, ("acme",)).get("/metrics").status_code == 403
    assert deployment.anonymous().get("/metrics").status_code == 401


def test_names_may_have_slashes(deployment: Deployment) -> None:
    client = deployment.client()
    job_id = _submit(client, queue="mail/eu")
    paused = client.post("/api/v1/queues/mail%2Feu/pause", json={"reason": "holidays"})
    assert (paused.status_code, paused.json()["queue"]) == (200, "mail/eu")
    assert client.post("/api/v1/queues/mail/eu/pause", json={"reason": "x"}).json()["code"] == "NO_SUCH_PATH"
    shared = client.post("/api/v1/queues/mail%2feu/tenants/a%2Fb", json={"reason": "fair", "weight": 2}).json()
    assert shared["tenants"]["a/b"]["weight"] == 2
    assert client.get(f"/api/v1/jobs/{job_id}?queue=mail/eu").status_code == 200
    # A name that is encoded twice is another name.
    twice = client.post("/api/v1/queues/mail%252Feu/pause", json={"reason": "x", "new": True})
    assert twice.json()["queue"] == "mail%2Feu"


@pytest.mark.parametrize("path", ["pause", "resume", "intake/pause", "intake/resume", "intake/limit", "tenants/acme"])
def test_an_unknown_queue_is_a_404(deployment: Deployment, path: str) -> None:
    client = deployment.client()
    _submit(client, queue="mail")
    body = {"reason": "x"} | ({"value": 5} if path == "intake/limit" else {"weight": 2} if "tenants" in path else {})
    refused = client.post(f"/api/v1/queues/mial/{path}", json=body)
    assert (refused.status_code, refused.json()["code"]) == (404, "NOT_FOUND")
    assert "did you mean 'mail'?" in refused.json()["detail"]
    assert '"new": true' in refused.json()["detail"]
    assert client.post(f"/api/v1/queues/mial/{path}", json=body | {"new": True}).status_code == 200


# Reuse of a key ----------------------------------------------------------------------------------------


def test_a_key_with_other_arguments_is_a_422(deployment: Deployment) -> None:
    client, headers = deployment.client(), {"Idempotency-Key": "k"}
    first = client.post("/api/v1/jobs", json={"task": "add", "payload": {"a": 1}}, headers=headers).json()["job_id"]
    for body in ({"task": "add", "payload": {"a": 2}}, {"task": "refuse"}):
        reply = client.post("/api/v1/jobs", json=body, headers=headers)
        assert (reply.status_code, reply.json()["code"]) == (422, "IDEMPOTENCY_KEY_REUSED"), reply.text
        assert (reply.headers["content-type"], reply.json()["job_id"]) == ("application/problem+json", first)
    # The same call in another form: a default written out, another order, another number format.
    reply = client.post("/api/v1/jobs", json={"task": "add", "payload": {"b": 1.0, "a": 1}}, headers=headers)
    assert (reply.status_code, reply.json()["job_id"], reply.json()["duplicate"]) == (202, first, True)
    reply = client.post(
        "/api/v1/jobs", json={"task": "add", "payload": {"a": 2}, "on_key_reuse": "return"}, headers=headers
    )
    assert (reply.status_code, reply.json()["job_id"], reply.json()["duplicate"]) == (202, first, True)


def test_a_bulk_request_answers_a_reused_key_per_item(deployment: Deployment) -> None:
    client = deployment.client()
    jobs = [{"task": "add", "payload": {"a": number}, "idempotency_key": "k"} for number in (1, 2, 1)]
    reply = client.post("/api/v1/jobs/bulk", json={"jobs": jobs}).json()
    assert (reply["accepted"], reply["refused"]) == (2, 1)
    assert (reply["results"][1]["error"]["status"], reply["results"][1]["error"]["code"]) == (
        422,
        "IDEMPOTENCY_KEY_REUSED",
    )
    assert [reply["results"][number]["duplicate"] for number in (0, 2)] == [False, True]


def test_a_wait_says_that_it_is_a_duplicate(working: Deployment) -> None:
    client, body = working.client(), {"task": "add", "payload": {"a": 1, "b": 2}}
    answers = [
        client.post("/api/v1/jobs?wait=20", json=body, headers={"Idempotency-Key": "k"}).json() for _ in range(2)
    ]
    assert [(answer["state"], answer["duplicate"]) for answer in answers] == [("succeeded", False), ("succeeded", True)]
    assert answers[0]["job_id"] == answers[1]["job_id"]


# Intake limits -----------------------------------------------------------------------------------------


def _set_limits(deployment: Deployment, **limits: Any) -> None:
    engine = deployment.service.app.engine
    deployment.call(lambda: engine.set_control("default", QueueControl(**limits)))


def test_a_bulk_request_is_limited_per_item(deployment: Deployment) -> None:
    _set_limits(deployment, intake_limit=3)
    jobs = [{"task": "add", "payload": {"a": number}} for number in range(8)]
    reply = deployment.client().post("/api/v1/jobs/bulk", json={"jobs": jobs}).json()
    assert (reply["accepted"], reply["refused"]) == (3, 5)
    assert [result.get("error") is None for result in reply["results"]] == [True] * 3 + [False] * 5
    assert {result["error"]["code"] for result in reply["results"][3:]} == {"INTAKE_LIMITED"}


def test_a_refusal_names_only_the_callers_tenant(deployment: Deployment) -> None:
    _set_limits(deployment, tenants={"acme": TenantControl(intake_limit=1)})
    acme = deployment.client("ann", Role.OPERATOR, ("acme",))
    zeta = deployment.client("zoe", Role.OPERATOR, ("zeta",))
    body = {"task": "add", "payload": {"a": 1}}
    with ThreadPoolExecutor(12) as pool:
        clients = [acme, zeta] * 6
        replies = list(pool.map(lambda client: client.post("/api/v1/jobs", json=body), clients))
    assert [reply.status_code for reply in replies[1::2]] == [202] * 6
    assert sorted(reply.status_code for reply in replies[::2]) == [202] + [429] * 5
    assert all("acme" in reply.json()["detail"] for reply in replies[::2] if reply.status_code == 429)


def test_only_tokens_of_all_tenants_read_the_backlog_of_the_queue(deployment: Deployment) -> None:
    acme = deployment.client("ann", Role.OPERATOR, ("acme",))
    body = {"task": "add", "payload": {"a": 1}}
    for _ in range(37):
        assert acme.post("/api/v1/jobs", json=body).status_code == 202
    _set_limits(deployment, intake_limit=37)
    refused = acme.post("/api/v1/jobs", json=body)
    assert (refused.status_code, refused.json()["code"]) == (429, "INTAKE_LIMITED")
    assert "37" not in refused.text
    bulk = acme.post("/api/v1/jobs/bulk", json={"jobs": [body]})
    assert "INTAKE_LIMITED" in bulk.text
    assert "37" not in bulk.text
    full = deployment.client().post("/api/v1/jobs", json=body)
    assert "37" in full.json()["detail"]
    bulk = deployment.client().post("/api/v1/jobs/bulk", json={"jobs": [body]})
    assert "37" in bulk.json()["results"][0]["error"]["detail"]
