"""Attacks by a principal with few permissions, or by a page in a browser."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from holdfast import RequireApproval
from holdfast.core.job import Envelope
from holdfast.core.principal import Role
from holdfast.core.text import too_deep
from holdfast.errors import Unauthorized
from holdfast.http.auth import DevAuthenticator
from holdfast.http.operation import MAX_DEPTH
from tests.http.deployment import Deployment, sample, serving
from tests.http.test_jobs import _submit
from tests.http.test_stream import _job_ids, _open_stream, _parse_events, _read


@pytest.mark.parametrize(
    "body",
    [b'\\"' * 24_000, b'\\"' * 24_000 + b"\\", b'"' + b'\\"' * 24_000, b'"\\' * 24_001],
    ids=["escaped quotes", "a backslash at the end", "a string without end", "quotes and backslashes"],
)
def test_depth_is_measured_in_one_pass(body: bytes) -> None:
    """Unclosed quotes must not cost quadratic time, which would block all requests."""
    started = time.thread_time()
    too_deep(b"[" * 65 + body, MAX_DEPTH)
    assert time.thread_time() - started < 5


def test_depth_is_not_hidden_by_strings() -> None:
    assert too_deep(b'["\\"",' * 65 + b"1" + b"]" * 65, MAX_DEPTH)
    assert not too_deep(b'["' + b"[" * 100 + b'\\""]', MAX_DEPTH)


def test_an_event_id_does_not_name_queues_of_other_tenants(deployment: Deployment) -> None:
    """Names and positions of other queues are not visible, and no event is missed."""
    theirs = deployment.client("eve", Role.OPERATOR, ("other",))
    mine = deployment.client("ada", Role.OPERATOR, ("acme",))
    _submit(theirs, queue="merger-with-globex")
    earlier = _submit(mine, queue="second")
    with mine.stream("GET", "/api/v1/stream") as reply:
        ready = next(event for event in _parse_events(reply) if event["event"] == "ready")
    assert "merger" not in ready["id"]
    with _open_stream(mine) as events:
        _submit(theirs, queue="merger-with-globex")
        _submit(theirs, queue="new-merger")
        submitted = [_submit(mine), _submit(mine, queue="second")]
        received = _read(events, 2)
    assert sorted(_job_ids(received)) == sorted(submitted)
    event_id = received[-1]["id"]
    assert re.fullmatch(r"[0-9]{13}-[A-Za-z0-9_-]{12}", event_id)
    submitted.append(_submit(mine, queue="second"))
    with _open_stream(mine, last=received[-1]["id"]) as events:
        submitted.append(_submit(mine, queue="third"))
        resumed = _read(events, 2)
        # The last second may be repeated, under the same ids, with what happened in it before the stream began.
        while submitted[-1] not in _job_ids(resumed):
            resumed += _read(events, 1)
    ids = {event["id"] for event in received}
    fresh = _job_ids([event for event in resumed if event["id"] not in ids])
    assert sorted({*fresh} - {earlier}) == sorted(submitted[2:])
    # A forged or changed id does not reveal anything about a queue.
    for forged in ("merger-with-globex=1.0", "default=1.0", event_id[:-4] + "AAAA", "AAAA", "=", "x" * 4_000):
        with _open_stream(mine, last=forged) as events:
            assert next(events)["event"] == "gap"


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Deployment]:
    """A deployment in which `add` requires approval."""
    app = sample(f"sqlite:///{tmp_path / 'jobs.db'}")
    app.guard.rule("sums", task="add", then=RequireApproval("sums are dangerous"))
    with serving(app, upkeep=False, run_endpoint=True) as deployment:
        yield deployment


def test_the_run_endpoint_applies_the_guard(guarded: Deployment) -> None:
    """A job that was not reviewed at submission, like a foreign message, is reviewed before it runs."""
    engine = guarded.service.operations.engine
    job = Envelope(job_id="unguarded", task="add", payload=b'{"a": 1}')
    guarded.call(lambda: engine.submit([job]))
    ran = guarded.client().post("/api/v1/internal/jobs/unguarded/run").json()
    assert (ran["state"], ran["result"]) == ("waiting_approval", None)


def _dead_letter_job(deployment: Deployment, client: httpx.Client, job_id: str) -> str:
    reply = client.post(f"/api/v1/internal/jobs/{job_id}/run?force_fail=true")
    assert reply.json()["state"] == "failed", reply.text
    (dead_letter,) = client.get("/api/v1/dlq").json()["dead_letters"]
    dlq_id: str = dead_letter["dlq_id"]
    return dlq_id


def test_a_replay_cannot_be_approved_by_its_requester(guarded: Deployment) -> None:
    """The principal that replays a dead letter is the requester of the new approval request."""
    eve, ada = guarded.client("eve"), guarded.client("ada")
    job_id = _submit(eve)
    (first,) = eve.get("/api/v1/approvals").json()["approvals"]
    approval = {"reason": "looks right"}
    assert ada.post(f"/api/v1/approvals/{first['approval_id']}/approve", json=approval).status_code == 200
    dlq_id = _dead_letter_job(guarded, eve, job_id)
    edited = {"reason": "again", "payload": {"a": 1_000_000}}
    assert eve.post(f"/api/v1/dlq/{dlq_id}/replay", json=edited).status_code == 200
    (second,) = eve.get("/api/v1/approvals?status=requested").json()["approvals"]
    assert second["requested_by"] == "eve"
    assert eve.post(f"/api/v1/approvals/{second['approval_id']}/approve", json=approval).status_code == 403
    assert ada.post(f"/api/v1/approvals/{second['approval_id']}/approve", json=approval).status_code == 200


def test_a_replay_whose_idempotency_key_is_in_use_is_refused(deployment: Deployment) -> None:
    """Otherwise the replay would be a duplicate of another job, and the dead letter would be lost."""
    eve = deployment.client("eve", Role.OPERATOR, ("acme",))
    job_id = _submit(eve)
    dlq_id = _dead_letter_job(deployment, eve, job_id)
    headers = {"Idempotency-Key": f"dlq:{dlq_id}:1"}
    assert eve.post("/api/v1/jobs", json={"task": "add", "payload": {"a": 2}}, headers=headers).status_code == 202
    body = {"reason": "again"}
    refused = eve.post(f"/api/v1/dlq/{dlq_id}/replay", json=body)
    assert refused.status_code == 409, refused.text
    assert eve.get(f"/api/v1/dlq/{dlq_id}").json()["status"] == "open"
    replayed = eve.post(f"/api/v1/dlq/{dlq_id}/replay", json=body).json()
    assert eve.get(f"/api/v1/jobs/{replayed['job_id']}").status_code == 200


def _scope(client: str | None = "127.0.0.1", **headers: str) -> dict[str, Any]:
    given = {"host": "127.0.0.1:8000", **headers}
    named = [(name.replace("_", "-").encode(), value.encode()) for name, value in given.items()]
    return {"client": client and (client, 5), "headers": named}


class _NoTokens:
    async def verify(self, text: str) -> Any:
        raise Unauthorized(text)


@pytest.mark.parametrize(
    "scope",
    [
        _scope("192.0.2.7"),
        _scope("2001:db8::7"),
        _scope(None),
        _scope("testclient"),
        _scope(x_forwarded_for="192.0.2.7"),
        _scope(forwarded="for=192.0.2.7"),
        _scope(host="evil.example:8000"),
        _scope(host="127.0.0.1.evil.example"),
        _scope(origin="http://evil.example"),
        _scope(sec_fetch_site="cross-site"),
        _scope(referer="http://evil.example/page"),
        _scope(referer="http://127.0.0.1:3000/"),
        _scope(referer="http://127.0.0.1:8000.evil.example/"),
        _scope(referer="http://127.0.0.1:8000@evil.example/"),
        _scope(referer="about:blank"),
        _scope(referer="http://["),
    ],
)
async def test_dev_mode_accepts_only_this_machine(scope: dict[str, Any]) -> None:
    with pytest.raises(Unauthorized):
        await DevAuthenticator(_NoTokens()).authenticate(scope)


async def test_the_dev_cookie_is_accepted_only_from_pages_of_the_server() -> None:
    """To a browser all ports of a machine are one site, so pages of another local server send the cookie, too."""
    authenticator = DevAuthenticator(_NoTokens())
    cookie = authenticator.exchange(authenticator.link("").partition("key=")[2]).partition(";")[0]
    for origin in ("same-origin", "none"):
        assert (await authenticator.authenticate(_scope(sec_fetch_site=origin, cookie=cookie))).name == "dev"
    assert (
        await authenticator.authenticate(_scope("::1", origin="http://127.0.0.1:8000", cookie=cookie))
    ).name == "dev"
    own_page = _scope(referer="http://127.0.0.1:8000/docs?a=b", cookie=cookie)
    assert (await authenticator.authenticate(own_page)).name == "dev"
    for other in (
        {"sec_fetch_site": "same-site"},
        {"origin": "http://127.0.0.1:3000"},
        {"origin": "null"},
        {"referer": "http://127.0.0.1:3000/docs"},
        {"referer": "http://evil.example/http://127.0.0.1:8000/"},
        {"origin": "http://127.0.0.1:8000", "referer": "http://evil.example/"},
    ):
        with pytest.raises(Unauthorized):
            await authenticator.authenticate(_scope(cookie=cookie, **other))
