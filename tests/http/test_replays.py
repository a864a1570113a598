"""`POST /api/v1/dlq/{dlq_id}/replay` is idempotent, on both pairs of stores."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from holdfast.testing import drain
from tests.http.deployment import Deployment, sample, serving

REASON = {"reason": "the bank is back"}


@pytest.fixture(params=["sqlite", pytest.param("redis+postgres", marks=[pytest.mark.redis, pytest.mark.postgres])])
def deployment(request: pytest.FixtureRequest, tmp_path: Path, namespace: str) -> Iterator[Deployment]:
    """Without a worker: jobs stay queued until a test drains them."""
    if request.param == "sqlite":
        app = sample(f"sqlite:///{tmp_path / 'jobs.db'}")
    else:
        url, ledger = request.getfixturevalue("redis_url"), request.getfixturevalue("postgres_url")
        app = sample(url, ledger=ledger, namespace=namespace)
    with serving(app, upkeep=True) as deployment:
        yield deployment


@pytest.fixture
def client(deployment: Deployment) -> httpx.Client:
    return deployment.client()


def fail_jobs(deployment: Deployment, client: httpx.Client, count: int = 1) -> list[str]:
    """Fail jobs; the ids of their dead letters."""
    for _ in range(count):
        assert client.post("/api/v1/jobs", json={"task": "refuse"}).status_code == 202
    run_jobs(deployment)
    return [row["dlq_id"] for row in client.get("/api/v1/dlq").json()["dead_letters"]]


def run_jobs(deployment: Deployment) -> None:
    """Run all due jobs and wait until the ledger has their events."""
    app = deployment.service.app

    async def run() -> None:
        await drain(app)
        await app.ledger.wait_caught_up(timeout=30)

    deployment.call(run)


def count_jobs(deployment: Deployment, client: httpx.Client) -> int:
    deployment.call(lambda: deployment.service.app.ledger.wait_caught_up(timeout=30))
    return len(client.get("/api/v1/jobs", params={"limit": 100}).json()["jobs"])


def replay(client: httpx.Client, dlq_id: str, key: str | None = None, **body: Any) -> httpx.Response:
    headers = {} if key is None else {"Idempotency-Key": key}
    return client.post(f"/api/v1/dlq/{dlq_id}/replay", json=REASON | body, headers=headers)


def test_identical_requests_make_one_job(deployment: Deployment, client: httpx.Client) -> None:
    (dlq_id,) = fail_jobs(deployment, client)
    first, *others = [replay(client, dlq_id) for _ in range(3)]
    assert first.status_code == 200
    for other in others:
        problem = other.json()
        assert (other.status_code, problem["code"], problem["job_id"]) == (
            409,
            "ALREADY_REPLAYED",
            first.json()["job_id"],
        )
    assert count_jobs(deployment, client) == 2


def test_fifty_parallel_requests_make_one_job(deployment: Deployment, client: httpx.Client) -> None:
    (dlq_id,) = fail_jobs(deployment, client)
    with ThreadPoolExecutor(50) as threads:
        responses = list(threads.map(lambda _: replay(client, dlq_id), range(50)))
    assert sorted(response.status_code for response in responses) == [200] + [409] * 49
    assert len({response.json()["job_id"] for response in responses}) == 1
    assert count_jobs(deployment, client) == 2


def test_the_same_key_is_the_same_replay(deployment: Deployment, client: httpx.Client) -> None:
    (dlq_id,) = fail_jobs(deployment, client)
    with ThreadPoolExecutor(50) as threads:
        responses = list(threads.map(lambda _: replay(client, dlq_id, "order-17"), range(50)))
    assert {response.status_code for response in responses} == {200}
    answers = [response.json() for response in responses]
    assert len({answer["job_id"] for answer in answers}) == 1
    assert [answer["duplicate"] for answer in answers].count(False) == 1
    # The key also holds after the replay has ended.
    run_jobs(deployment)
    assert replay(client, dlq_id, "order-17").json() == answers[0] | {"duplicate": True}
    assert count_jobs(deployment, client) == 2


def test_a_key_with_other_options_is_refused(deployment: Deployment, client: httpx.Client) -> None:
    one, two = fail_jobs(deployment, client, 2)
    assert replay(client, one, "k").status_code == 200
    edited = {"payload": {"reason": "other"}}
    for response in (
        replay(client, two, "k"),
        replay(client, one, "k", **edited),
        replay(client, one, "k", again=True),
    ):
        assert (response.status_code, response.json()["code"]) == (422, "REPLAY_KEY_REUSED")
    assert client.get(f"/api/v1/dlq/{two}").json()["status"] == "open"
    assert replay(client, two, "not a key").status_code == 422


def test_again_replays_all_the_same(deployment: Deployment, client: httpx.Client) -> None:
    (dlq_id,) = fail_jobs(deployment, client)
    numbers = [replay(client, dlq_id, again=True).json()["number"] for _ in range(2)]
    assert numbers == [1, 2]
    assert replay(client, dlq_id, again="yes").status_code == 422


def test_a_bulk_replay_skips_and_counts_what_is_replayed(deployment: Deployment, client: httpx.Client) -> None:
    first, *_ = fail_jobs(deployment, client, 3)
    assert replay(client, first).status_code == 200
    report = client.post("/api/v1/dlq/replay", json=REASON | {"dry_run": False, "rate_per_s": 100}).json()
    assert (report["matched"], report["done"], report["failed"], report["skipped"]) == (2, 2, 0, 1)
    assert count_jobs(deployment, client) == 6
