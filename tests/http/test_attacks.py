"""What somebody with a token of little worth, or a page in somebody's browser, might try."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from holdfast import RequireApproval
from holdfast.core.job import Envelope
from holdfast.core.principal import Role
from holdfast.errors import Unauthorized
from holdfast.http.auth import DevAuthenticator
from holdfast.http.operation import too_deep
from holdfast.http.subscribers import EventIdCodec
from tests.http.deployment import World, sample, serving
from tests.http.test_jobs import _submit
from tests.http.test_stream import _events, _ids, _listening, _take


@pytest.mark.parametrize(
    "body",
    [b'\\"' * 24_000, b'\\"' * 24_000 + b"\\", b'"' + b'\\"' * 24_000, b'"\\' * 24_001],
    ids=["escaped quotes", "a backslash at the end", "a string without end", "quotes and backslashes"],
)
def test_depth_is_measured_in_one_pass(body: bytes) -> None:
    """Quotes that never close must not be looked for from each of them: everybody would wait for that."""
    began = time.thread_time()
    too_deep(b"[" * 65 + body)
    assert time.thread_time() - began < 5


def test_depth_is_not_hidden_by_strings() -> None:
    assert too_deep(b'["\\"",' * 65 + b"1" + b"]" * 65)
    assert not too_deep(b'["' + b"[" * 100 + b'\\""]')


def test_an_events_id_names_no_queue_of_others(world: World) -> None:
    """Neither their names nor how far they have come, and all the same nothing is missed or comes twice."""
    theirs = world.client("eve", Role.OPERATOR, ("other",))
    mine = world.client("ada", Role.OPERATOR, ("acme",))
    _submit(theirs, queue="merger-with-globex")
    _submit(mine, queue="second")
    with mine.stream("GET", "/api/v1/stream") as reply:
        beginning = next(event for event in _events(reply) if event["event"] == "ready")
    assert "merger" not in beginning["id"]
    with _listening(mine) as events:
        _submit(theirs, queue="merger-with-globex")
        _submit(theirs, queue="new-merger")
        made = [_submit(mine), _submit(mine, queue="second")]
        told = _take(events, 2)
    assert sorted(_ids(told)) == sorted(made)
    place = told[-1]["id"]
    assert "default" not in place
    assert b"default" not in base64.urlsafe_b64decode(place)
    made.append(_submit(mine, queue="second"))
    with _listening(mine, last=told[-1]["id"]) as events:
        made.append(_submit(mine, queue="third"))
        again = _take(events, 2)
    assert sorted(_ids(again)) == sorted(made[2:])
    # Neither a place of one's own making nor a changed one says anything about a queue.
    for made_up in ("merger-with-globex=1.0", "default=1.0", place[:-4] + "AAAA", "AAAA", "=", "x" * 4_000):
        with _listening(mine, last=made_up) as events:
            assert next(events)["event"] == "gap"


def test_places_are_known_to_every_process_of_the_same_key() -> None:
    place = "a%3Bb=12-3.4;c=5"
    covered = EventIdCodec(b"key").encode(place)
    assert EventIdCodec(b"key").decode(covered) == place
    assert EventIdCodec(b"other").decode(covered) is None
    assert len(covered) == len(EventIdCodec(b"key").encode("a=1"))


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[World]:
    """Additions are for people to decide about."""
    app = sample(f"sqlite:///{tmp_path / 'jobs.db'}")
    app.guard.rule("sums", task="add", then=RequireApproval("sums are dangerous"))
    with serving(app, upkeep=False, run_endpoint=True) as world:
        yield world


def test_the_run_endpoint_goes_by_the_guard(guarded: World) -> None:
    """A job that came past the desk, as other programs hand them in, is shown to the guard before it runs."""
    engine = guarded.service.operations.engine
    job = Envelope(job_id="past-the-desk", task="add", payload=b'{"a": 1}')
    guarded.call(lambda: engine.submit([job]))
    ran = guarded.client().post("/api/v1/internal/jobs/past-the-desk/run").json()
    assert (ran["state"], ran["result"]) == ("waiting_approval", None)


def _letter(world: World, client: httpx.Client, job_id: str) -> str:
    guard_free = client.post(f"/api/v1/internal/jobs/{job_id}/run?force_fail=true")
    assert guard_free.json()["state"] == "failed", guard_free.text
    (letter,) = client.get("/api/v1/dlq").json()["dead_letters"]
    found: str = letter["dlq_id"]
    return found


def test_nobody_approves_their_own_replay(guarded: World) -> None:
    """Whoever replays a letter, edited at that, has asked for what the guard then wants approved."""
    eve, ada = guarded.client("eve"), guarded.client("ada")
    job_id = _submit(eve)
    (first,) = eve.get("/api/v1/approvals").json()["approvals"]
    yes = {"reason": "looks right"}
    assert ada.post(f"/api/v1/approvals/{first['approval_id']}/approve", json=yes).status_code == 200
    dlq_id = _letter(guarded, eve, job_id)
    edited = {"reason": "again", "payload": {"a": 1_000_000}}
    assert eve.post(f"/api/v1/dlq/{dlq_id}/replay", json=edited).status_code == 200
    (asked,) = eve.get("/api/v1/approvals?status=requested").json()["approvals"]
    assert asked["requested_by"] == "eve"
    assert eve.post(f"/api/v1/approvals/{asked['approval_id']}/approve", json=yes).status_code == 403
    assert ada.post(f"/api/v1/approvals/{asked['approval_id']}/approve", json=yes).status_code == 200


def test_a_key_that_was_taken_does_not_swallow_a_replay(world: World) -> None:
    """A letter whose replay is taken for somebody's other job would be gone, by the hand of one person."""
    eve = world.client("eve", Role.OPERATOR, ("acme",))
    job_id = _submit(eve)
    dlq_id = _letter(world, eve, job_id)
    taken = {"Idempotency-Key": f"dlq:{dlq_id}:1"}
    assert eve.post("/api/v1/jobs", json={"task": "add", "payload": {"a": 2}}, headers=taken).status_code == 202
    again = {"reason": "again"}
    refused = eve.post(f"/api/v1/dlq/{dlq_id}/replay", json=again)
    assert refused.status_code == 409, refused.text
    assert eve.get(f"/api/v1/dlq/{dlq_id}").json()["status"] == "open"
    replayed = eve.post(f"/api/v1/dlq/{dlq_id}/replay", json=again).json()
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
    ],
)
async def test_dev_mode_is_for_this_machine(scope: dict[str, Any]) -> None:
    with pytest.raises(Unauthorized):
        await DevAuthenticator(_NoTokens()).authenticate(scope)


async def test_the_dev_cookie_is_for_the_servers_own_pages() -> None:
    """To a browser all ports of this machine are one site: a page of another server here comes with the cookie, too."""
    gate = DevAuthenticator(_NoTokens())
    cookie = gate.exchange(gate.link("").partition("key=")[2]).partition(";")[0]
    for origin in ("same-origin", "none"):
        assert (await gate.authenticate(_scope(sec_fetch_site=origin, cookie=cookie))).name == "dev"
    assert (await gate.authenticate(_scope("::1", origin="http://127.0.0.1:8000", cookie=cookie))).name == "dev"
    for other in ({"sec_fetch_site": "same-site"}, {"origin": "http://127.0.0.1:3000"}, {"origin": "null"}):
        with pytest.raises(Unauthorized):
            await gate.authenticate(_scope(cookie=cookie, **other))
