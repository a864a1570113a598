"""What a token does not see, and when it ends: queue-wide audit entries, open streams and waits (H6)."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import pytest
from sqlalchemy import text

from holdfast.core.principal import Principal, Role
from holdfast.errors import LedgerUnavailable
from holdfast.execution.backend import backend_of
from holdfast.http.token_watch import ENDS_S, TokenWatch
from holdfast.operations.access import TokenOperations
from holdfast.testing import ManualClock
from tests.http.deployment import ROOT, TIMEOUT_S, Deployment


def wait_until(is_true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not is_true():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def test_queue_wide_audit_entries_need_a_token_of_all_tenants(on_all_stores: Deployment) -> None:
    root = on_all_stores.client("ada")
    viewer = on_all_stores.client("dora", Role.VIEWER, ("default",))
    queues = on_all_stores.service.operations.queues
    on_all_stores.call(lambda: queues.update_tenant(ROOT, "default", "acme", reason="secret", weight=7))
    job = root.post("/api/v1/jobs", json={"task": "park", "payload": {}}).json()["job_id"]
    wait_until(lambda: root.get(f"/api/v1/jobs/{job}").json().get("state") == "suspended", "not suspended")
    root.post(f"/api/v1/suspended/{job}/discard", json={"reason": "r"})

    def entries(client: object, query: str = "") -> list[tuple[str, str]]:
        found = client.get(f"/api/v1/operator-log?limit=200{query}").json()["entries"]  # type: ignore[attr-defined]
        return [(entry["target"], entry["tenant_id"]) for entry in found]

    wait_until(lambda: {"queue", "job"} <= {target for target, _ in entries(root)}, "the log is not complete")
    assert set(entries(viewer)) == {("job", "default"), ("token", "default")}
    assert entries(viewer, "&target=queue") == []
    assert entries(viewer, "&type=operator.tenant") == []
    # A page is filled with entries that the token may see.
    page = viewer.get("/api/v1/operator-log?limit=1&until=2999-01-01T00:00:00Z").json()
    assert [entry["target"] for entry in page["entries"]] == ["job"]


# Requests that stay open ------------------------------------------------------------------------------


def _change(deployment: Deployment, statement: str, token_id: str) -> None:
    """Change a token in the ledger."""

    def change() -> Any:
        yield text(statement).bindparams(id=token_id)

    ledger: Any = deployment.service.operations.ledger
    deployment.call(lambda: ledger.operators._run(change()))


def _revoke(deployment: Deployment, token_id: str) -> None:
    """Revoke a token as another process does: this one does not notice."""

    async def revoke() -> None:
        ledger = backend_of(deployment.service.app).ledger
        assert ledger is not None
        await TokenOperations(ledger).revoke(ROOT, token_id)

    deployment.call(revoke)


def _new_token(deployment: Deployment, tenants: tuple[str, ...] = ("acme",)) -> tuple[str, str]:
    tokens = deployment.service.operations.tokens
    row, token = deployment.call(
        lambda: tokens.create(ROOT, name=f"eve{len(tenants)}", role=Role.OPERATOR, tenants=list(tenants))
    )
    return row.token_id, token


class OpenStream:
    """A request on its own socket. It is read only on demand."""

    def __init__(self, deployment: Deployment, token: str, request: str = "GET /api/v1/stream", body: str = "") -> None:
        url = urlsplit(deployment.base)
        self.sock = socket.socket()
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2_048)
        self.sock.settimeout(TIMEOUT_S)
        self.sock.connect((url.hostname, url.port))
        head = f"{request} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {token}\r\nconnection: close\r\n"
        if body:
            head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.sock.sendall(f"{head}\r\n{body}".encode())

    def read_to_end(self) -> bytes:
        received = b""
        with self.sock:
            while True:
                try:
                    chunk = self.sock.recv(65_536)
                except ConnectionResetError:
                    return received
                if not chunk:
                    return received
                received += chunk


def _watch_of(deployment: Deployment) -> TokenWatch:
    watch = deployment.service._token_watch
    assert watch is not None
    return watch


def _open_requests(deployment: Deployment) -> int:
    watch = deployment.service._token_watch
    return 0 if watch is None else len(watch._open)


def test_open_requests_end_with_their_token(on_all_stores: Deployment) -> None:
    """All kinds of them, by one query; those of other tokens stay."""
    deployment = on_all_stores
    queues = deployment.service.operations.queues
    deployment.call(lambda: queues.update_control(ROOT, "default", reason="r", verb="pause", paused=True))
    token_id, token = _new_token(deployment)
    stays = OpenStream(deployment, deployment.token())
    job = '{"task": "park", "tenant_id": "acme"}'
    waiting = OpenStream(deployment, token, "POST /api/v1/jobs?wait=60", job)
    client = deployment.client()
    wait_until(lambda: client.get("/api/v1/jobs").json()["jobs"] != [], "not submitted")
    job_id = client.get("/api/v1/jobs").json()["jobs"][0]["job_id"]
    ended = [
        waiting,
        OpenStream(deployment, token),
        OpenStream(deployment, token, "GET /api/v1/stream?queue=idle"),
        OpenStream(deployment, token, f"GET /api/v1/stream?job_id={job_id}"),
    ]
    wait_until(lambda: _open_requests(deployment) == 5, "not open")
    _revoke(deployment, token_id)
    started = time.monotonic()
    received = [each.read_to_end() for each in ended]
    assert time.monotonic() - started < ENDS_S
    assert b" 202 " in received[0]
    assert all(b"event: ready" in each for each in received[1:])
    assert _open_requests(deployment) == 1
    assert deployment.service.hub.subscriber_count == 1
    stays.sock.close()
    wait_until(lambda: _open_requests(deployment) == 0, "the stream is not closed")


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE tokens SET role = 'viewer' WHERE token_id = :id",
        """UPDATE tokens SET tenants = '["globex"]' WHERE token_id = :id""",
        "DELETE FROM tokens WHERE token_id = :id",
    ],
    ids=["role", "tenants", "deleted"],
)
def test_a_stream_ends_if_its_token_changes(on_all_stores: Deployment, change: str) -> None:
    token_id, token = _new_token(on_all_stores)
    stream = OpenStream(on_all_stores, token)
    wait_until(lambda: _open_requests(on_all_stores) == 1, "not open")
    on_all_stores.call(lambda: _watch_of(on_all_stores).check())
    assert _open_requests(on_all_stores) == 1
    _change(on_all_stores, change, token_id)
    on_all_stores.call(lambda: _watch_of(on_all_stores).check())
    assert b"event: ready" in stream.read_to_end()


def test_a_stream_ends_when_its_token_expires(deployment: Deployment) -> None:
    tokens = deployment.service.operations.tokens
    _, token = deployment.call(
        lambda: tokens.create(ROOT, name="eve", role=Role.VIEWER, tenants=["acme"], expires_in=timedelta(hours=1))
    )
    stream = OpenStream(deployment, token)
    wait_until(lambda: _open_requests(deployment) == 1, "not open")
    tokens._clock = ManualClock(time.time_ns() // 1_000_000 + 7_200_000)
    assert b"event: ready" in stream.read_to_end()


def test_the_connection_of_a_client_that_does_not_read_is_aborted(deployment: Deployment) -> None:
    token_id, token = _new_token(deployment, ("default", "acme"))
    stream = OpenStream(deployment, token)
    wait_until(lambda: deployment.service.hub.subscriber_count == 1, "not open")
    client = deployment.client()
    jobs = [{"task": "refuse", "payload": {"reason": "x" * 2_000}} for _ in range(80)]

    def is_blocked() -> bool:
        (subscriber,) = deployment.service.hub._all()
        return subscriber._waiting > 300_000

    deadline = time.monotonic() + TIMEOUT_S
    while not is_blocked():
        assert time.monotonic() < deadline
        assert client.post("/api/v1/jobs/bulk", json={"jobs": jobs}).status_code == 200
    _revoke(deployment, token_id)
    started = time.monotonic()
    wait_until(lambda: deployment.service.hub.subscriber_count == 0, "the stream is still open")
    assert time.monotonic() - started < ENDS_S
    stream.sock.close()


async def test_tokens_that_cannot_be_read_end_requests_in_the_same_time() -> None:
    """Whether the ledger refuses or does not answer; a short outage ends nothing. Without requests nothing is read."""
    now = [100.0]
    valid = {"one": ROOT}
    answers: list[str] = []
    reads: list[list[str]] = []

    async def find_valid(token_ids: Sequence[str]) -> dict[str, Principal]:
        reads.append(list(token_ids))
        answer = answers.pop(0) if answers else "yes"
        if answer == "refused":
            raise LedgerUnavailable("unreachable")
        if answer == "silent":
            await asyncio.Event().wait()
        return valid

    watch, ended = TokenWatch(find_valid, lambda: now[0]), asyncio.Event()
    with watch.watching("", ROOT, ended.set, ended.set):
        assert watch._watching is None
    with watch.watching("one", ROOT, ended.set, ended.set), watch.watching("one", ROOT, ended.set, ended.set):
        assert await watch.check()
        assert reads == [["one"]]
        now[0] += 3
        answers.append("refused")
        assert not await watch.check()
        assert not ended.is_set()
        assert await watch.check()
        now[0] += 4.1
        answers.append("refused")
        assert not await watch.check()
        assert ended.is_set()
    ended.clear()
    with watch.watching("one", ROOT, ended.set, ended.set):
        assert await watch.check()
        now[0] += 4.1
        answers.append("silent")
        async with asyncio.timeout(2):
            assert not await watch.check()
        assert ended.is_set()
    await watch.close()
