"""Bad input and attacks: every one has its own error, and no error reveals too much."""

from __future__ import annotations

import socket
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from holdfast.core.principal import Role
from holdfast.http.operation import MAX_DEPTH
from tests.http.deployment import ROOT, Deployment, sample, serving
from tests.http.test_jobs import _run, _submit

_JSON = {"content-type": "application/json"}


def _problem(reply: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/problem+json"
    problem: dict[str, Any] = reply.json()
    assert (problem["code"], problem["status"]) == (code, status)
    assert "Traceback" not in reply.text
    return problem


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b'{"task": nope}', b"{]"])
def test_invalid_json_is_malformed(shared: Deployment, body: bytes) -> None:
    _problem(shared.client().post("/api/v1/jobs", content=body, headers=_JSON), 400, "MALFORMED_REQUEST")


@pytest.mark.parametrize(
    "body",
    [
        "[]",
        "null",
        '{"task": 1}',
        '{"task": "add", "payload": [1]}',
        '{"task": "add", "payload": "x"}',
        '{"task": "add", "colour": "red"}',
        '{"task": "add", "delay_s": -1}',
        '{"task": "add", "payload": {"a": 1}, "delay_s": 1, "run_at": "2030-01-01T00:00:00Z"}',
        '{"task": "add", "run_at": "2030-01-01T00:00:00"}',
        '{"task": "add", "priority": "urgent"}',
        '{"task": "a b"}',
    ],
)
def test_json_that_does_not_match_the_schema_is_invalid(shared: Deployment, body: str) -> None:
    _problem(shared.client().post("/api/v1/jobs", content=body, headers=_JSON), 422, "INVALID_REQUEST")


@pytest.mark.parametrize("number", ["1e999", "-1e999", "9" * 5_000])
def test_a_number_that_json_cannot_hold_is_invalid(shared: Deployment, number: str) -> None:
    body = '{"task": "add", "payload": {"a": 1}, "context": {"x": ' + number + "}}"
    _problem(shared.client().post("/api/v1/jobs", content=body, headers=_JSON), 422, "INVALID_REQUEST")


def test_arguments_that_do_not_match_the_task_are_invalid(shared: Deployment) -> None:
    client = shared.client()
    reply = client.post("/api/v1/jobs", json={"task": "add", "payload": {"a": "one"}})
    _problem(reply, 422, "INVALID_PAYLOAD")
    problem = _problem(client.post("/api/v1/jobs", json={"task": "nope"}), 404, "UNKNOWN_TASK")
    assert "add" not in problem["detail"]


def test_a_misspelt_filter_does_not_show_everything(shared: Deployment) -> None:
    _problem(shared.client().get("/api/v1/jobs?tenantid=acme"), 422, "INVALID_REQUEST")
    _problem(shared.client().get("/api/v1/jobs?limit=1&limit=2"), 422, "INVALID_REQUEST")
    for path in ("jobs", "dlq", "approvals", "suspended", "operator-log"):
        _problem(shared.client().get(f"/api/v1/{path}?cursor=nope"), 422, "INVALID_REQUEST")


def test_a_huge_body_is_refused_before_it_is_read(shared: Deployment) -> None:
    """By its content length, or without one while it is received."""
    client = shared.client()
    huge = b'{"task": "add", "payload": {"a": "' + b"x" * 300_000 + b'"}}'
    _problem(client.post("/api/v1/jobs", content=huge, headers=_JSON), 413, "BODY_TOO_LARGE")
    _problem(
        client.post("/api/v1/jobs", content=iter([huge[:1000], huge[1000:]]), headers=_JSON), 413, "BODY_TOO_LARGE"
    )
    large = {"task": "refuse", "payload": {"reason": "x" * 60_000}}
    _problem(client.post("/api/v1/jobs", json=large), 413, "PAYLOAD_TOO_LARGE")


def test_a_deep_body_is_refused(shared: Deployment) -> None:
    client, deep = shared.client(), MAX_DEPTH + 1
    for text in ("[" * deep + "]" * deep, "[" * 50_000):
        body = '{"task": "refuse", "payload": {"reason": ' + text + "}}"
        _problem(client.post("/api/v1/jobs", content=body, headers=_JSON), 422, "INVALID_REQUEST")
    brackets = {"task": "refuse", "payload": {"reason": "[{" * 500}}
    assert client.post("/api/v1/jobs", json=brackets).status_code == 202
    many = {"task": "add", "payload": {"a": 1}, "context": {"x": [[] for _ in range(500)]}}
    assert client.post("/api/v1/jobs", json=many).status_code == 202


def test_only_json_is_accepted(shared: Deployment) -> None:
    reply = shared.client().post("/api/v1/jobs", content=b"{}", headers={"content-type": "text/plain"})
    _problem(reply, 415, "UNSUPPORTED_MEDIA_TYPE")


@pytest.mark.parametrize(
    "given",
    ["", "Bearer", "Bearer x", "Basic YTpi", "Bearer hf_0000000000000000_" + "A" * 43, "Bearer " + "h" * 9_000],
)
def test_a_bad_token_is_always_the_same_401(shared: Deployment, given: str) -> None:
    expected = shared.anonymous().get("/api/v1/jobs")
    reply = shared.anonymous(authorization=given).get("/api/v1/jobs")
    _problem(reply, 401, "UNAUTHORIZED")
    assert reply.headers["www-authenticate"].startswith("Bearer")
    assert reply.content == expected.content


def test_a_revoked_token_is_refused(deployment: Deployment) -> None:
    client = deployment.client("eve")
    tokens = deployment.service.operations.tokens
    (row,) = [row for row in deployment.call(lambda: tokens.list(ROOT)) if row.name == "eve"]
    deployment.call(lambda: tokens.revoke(ROOT, row.token_id))
    _problem(client.get("/api/v1/jobs"), 401, "UNAUTHORIZED")


@pytest.mark.parametrize(
    ("role", "method", "path"),
    [
        (Role.VIEWER, "POST", "/api/v1/jobs"),
        (Role.APPROVER, "POST", "/api/v1/jobs"),
        (Role.VIEWER, "POST", "/api/v1/jobs/x/cancel"),
        (Role.OPERATOR, "POST", "/api/v1/approvals/x/approve"),
        (Role.VIEWER, "POST", "/api/v1/queues/default/pause"),
    ],
)
def test_a_role_without_the_permission_is_refused(shared: Deployment, role: Role, method: str, path: str) -> None:
    _problem(shared.client(role.value, role).request(method, path, json={}), 403, "FORBIDDEN")


def test_queue_operations_need_access_to_all_tenants(shared: Deployment) -> None:
    client = shared.client("olga", Role.OPERATOR, ("acme",))
    _problem(client.post("/api/v1/queues/default/pause", json={"reason": "mine"}), 403, "FORBIDDEN")
    _problem(client.get("/api/v1/workers"), 403, "FORBIDDEN")


@pytest.mark.parametrize("verb", ["diff", "replay"])
def test_an_edited_payload_must_be_an_object(deployment: Deployment, verb: str) -> None:
    client = deployment.client("ada")
    _run(client, _submit(client), "?force_fail=true")
    (dead_letter,) = client.get("/api/v1/dlq").json()["dead_letters"]
    body = {"payload": [1], **({"reason": "try"} if verb == "replay" else {})}
    _problem(client.post(f"/api/v1/dlq/{dead_letter['dlq_id']}/{verb}", json=body), 422, "INVALID_REQUEST")


def test_resources_of_another_tenant_are_not_found(deployment: Deployment) -> None:
    """In every endpoint, list and count, with the same text as if they did not exist."""
    mine, other = deployment.client("ada"), deployment.client("eve", Role.ADMIN, ("acme",))
    job_id = _submit(mine)
    _run(mine, job_id, "?force_fail=true")
    parked = _submit(mine, "park", {})
    _run(mine, parked)
    (dead_letter,) = mine.get("/api/v1/dlq").json()["dead_letters"]
    dlq_id, reason = dead_letter["dlq_id"], {"reason": "curious"}
    never = other.get("/api/v1/jobs/never").json()
    for method, path, body in (
        ("GET", f"/api/v1/jobs/{job_id}", None),
        ("GET", f"/api/v1/jobs/{job_id}?queue=default", None),
        ("GET", f"/api/v1/jobs/{job_id}/events", None),
        ("POST", f"/api/v1/jobs/{job_id}/cancel", reason),
        ("POST", f"/api/v1/jobs/{job_id}/retry", reason),
        ("POST", f"/api/v1/internal/jobs/{parked}/run", None),
        ("GET", f"/api/v1/dlq/{dlq_id}", None),
        ("POST", f"/api/v1/dlq/{dlq_id}/diff", {"payload": {}}),
        ("POST", f"/api/v1/dlq/{dlq_id}/replay", reason),
        ("POST", f"/api/v1/dlq/{dlq_id}/discard", reason),
        ("POST", f"/api/v1/dlq/{dlq_id}/confirm", None),
        ("POST", f"/api/v1/dlq/{dlq_id}/keep", reason),
        ("POST", f"/api/v1/suspended/{parked}/resume", reason),
        ("POST", f"/internal/tasks/suspended/{parked}/discard", reason),
        ("GET", f"/api/v1/stream?job_id={job_id}", None),
        ("GET", "/api/v1/approvals/never", None),
        ("POST", "/api/v1/jobs", {"task": "add", "payload": {"a": 1}, "tenant_id": "default"}),
    ):
        reply = other.request(method, path, json=body)
        assert reply.status_code == 404, f"{method} {path}: {reply.status_code} {reply.text}"
    (result,) = other.post("/api/v1/suspended/resume", json=reason | {"job_ids": [parked]}).json()["results"]
    assert (result["done"], result["code"]) == (False, "UNKNOWN_JOB")
    gone = other.get(f"/api/v1/jobs/{job_id}").json()
    assert gone["detail"].replace(job_id, "never") == never["detail"]
    assert other.get("/api/v1/jobs").json() == {"jobs": [], "cursor": None}
    assert other.get("/api/v1/jobs?tenant_id=default").json()["jobs"] == []
    assert other.get("/api/v1/dlq").json()["dead_letters"] == []
    assert other.get("/api/v1/dlq?tenant_id=default").json()["dead_letters"] == []
    assert other.get("/api/v1/dlq/groups").json()["groups"] == []
    assert other.get("/api/v1/suspended").json()["jobs"] == []
    assert other.get("/api/v1/queues").json()["queues"] == []
    # The creation of a token of this tenant belongs to the tenant.
    assert {entry["tenant_id"] for entry in other.get("/api/v1/operator-log").json()["entries"]} == {"acme"}
    assert not any(other.get("/internal/tasks/stats").json()["states"].values())
    assert mine.get(f"/api/v1/jobs/{parked}").json()["state"] == "suspended"


def test_a_discard_cannot_be_confirmed_by_its_requester(deployment: Deployment) -> None:
    ada, bob = deployment.client("ada"), deployment.client("bob")
    job_id = _submit(ada)
    _run(ada, job_id, "?force_fail=true")
    (dead_letter,) = ada.get("/api/v1/dlq").json()["dead_letters"]
    path = f"/api/v1/dlq/{dead_letter['dlq_id']}"
    assert ada.post(f"{path}/discard", json={"reason": "junk"}).json()["status"] == "discard_requested"
    _problem(ada.post(f"{path}/confirm"), 403, "FORBIDDEN")
    assert bob.post(f"{path}/confirm").json()["status"] == "discarded"
    _problem(bob.post(f"{path}/replay", json={"reason": "oh"}), 409, "CONFLICT")


def test_a_replay_that_would_take_too_long_is_refused(deployment: Deployment) -> None:
    ada = deployment.client("ada")
    _run(ada, _submit(ada), "?force_fail=true")
    body = {"reason": "slowly", "dry_run": False, "rate_per_s": 1e-9}
    problem = _problem(ada.post("/api/v1/dlq/replay", json=body), 409, "CONFLICT")
    assert "raise the rate" in problem["detail"]
    assert ada.post("/api/v1/dlq/replay", json=body | {"rate_per_s": 1}).json()["done"] == 1


def test_ids_cannot_break_out_of_a_header(shared: Deployment) -> None:
    client = shared.client()
    raw = "POST /api/v1/jobs HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 2\r\n"
    raw += f"authorization: {client.headers['authorization']}\r\nidempotency-key: a\tb\r\nconnection: close\r\n\r\n{{}}"
    assert b"422" in _send(shared, raw.encode()).split(b"\r\n")[0]
    reply = client.get("/api/v1/jobs/x%0d%0aset-cookie:%20a=b")
    assert reply.status_code == 404
    assert "set-cookie" not in reply.headers
    _problem(
        client.post("/api/v1/jobs", json={"task": "add", "payload": {"a": 1}, "queue": "a\r\nb"}),
        422,
        "INVALID_REQUEST",
    )


def _send(deployment: Deployment, raw: bytes) -> bytes:
    url = urlsplit(deployment.base)
    with socket.create_connection((url.hostname or "", url.port or 0), timeout=10) as sock:
        sock.sendall(raw)
        parts = []
        while part := sock.recv(65_536):
            parts.append(part)
    return b"".join(parts)


def test_an_unexpected_error_reveals_nothing(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*_: object) -> None:
        raise RuntimeError("the password is swordfish")

    monkeypatch.setattr(deployment.service.operations.engine, "queues", explode)
    reply = deployment.client().get("/api/v1/queues")
    _problem(reply, 500, "INTERNAL_ERROR")
    assert "swordfish" not in reply.text


def test_an_unreachable_engine_is_a_503(tmp_path: Any, make_redis: Any, postgres_url: str) -> None:
    server = make_redis()
    app = sample(server.url, ledger=postgres_url)
    with serving(app, upkeep=False) as deployment:
        client = deployment.client()
        _submit(client)
        server.stop()
        reply = client.post("/api/v1/jobs", json={"task": "add", "payload": {"a": 1}})
        problem = _problem(reply, 503, "ENGINE_UNAVAILABLE")
        assert int(reply.headers["retry-after"]) >= 1
        assert str(server.port) not in problem["detail"]
        ready = client.get("/readyz")
        assert (ready.status_code, ready.json()["engine"]) == (503, "down")
        assert client.get("/healthz").status_code == 200
