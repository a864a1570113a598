"""Many queues of one tenant: the next one is refused, and lists cost what the caller's own queues cost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.http.deployment import Deployment, sample, serving

_JOBS = "/api/v1/jobs"
_QUEUES = "/api/v1/queues"


@pytest.fixture(params=["embedded", pytest.param("redis", marks=pytest.mark.redis)])
def limited(request: pytest.FixtureRequest, tmp_path: Path, namespace: str) -> Iterator[Deployment]:
    """A tenant may have two queues."""
    settings = {"url": f"sqlite:///{tmp_path / 'jobs.db'}"}
    if request.param == "redis":
        url = request.getfixturevalue("redis_url")
        settings = {"url": url, "namespace": namespace, "ledger": f"sqlite:///{tmp_path / 'ledger.db'}"}
    with serving(sample(**settings, tenant_queue_limit=2), upkeep=True) as deployment:
        yield deployment


def _job(queue: str) -> dict[str, Any]:
    return {"task": "add", "payload": {"a": 1}, "queue": queue, "delay_s": 3_600}


def _names(client: httpx.Client, **query: Any) -> list[str]:
    return [queue["queue"] for queue in client.get(_QUEUES, params=query).json()["queues"]]


def test_the_next_new_queue_is_refused(limited: Deployment) -> None:
    acme = limited.client("acme", tenants=("acme",))
    for queue in ("a", "b", "a"):
        assert acme.post(_JOBS, json=_job(queue)).status_code == 202
    refused = acme.post(_JOBS, json=_job("c"))
    assert (refused.status_code, refused.json()["code"]) == (429, "QUEUE_LIMIT_REACHED")
    assert "tenant_queue_limit" in refused.json()["detail"]
    # In a bulk request, only the items of the new queue.
    bulk = acme.post(f"{_JOBS}/bulk", json={"jobs": [_job("a"), _job("c"), _job("default"), _job("b"), _job("c")]})
    results = bulk.json()["results"]
    codes = [result["error"] and result["error"]["code"] for result in results]
    assert codes == [None, "QUEUE_LIMIT_REACHED", None, None, "QUEUE_LIMIT_REACHED"]
    # Other tenants are not affected.
    zeta = limited.client("zeta", tenants=("zeta",))
    assert zeta.post(_JOBS, json=_job("c")).status_code == 202
    assert _names(limited.client()) == ["a", "b", "c", "default"]


def test_a_list_of_queues_reads_only_those_of_the_caller(deployment: Deployment, monkeypatch: Any) -> None:
    greedy, small = deployment.client("greedy", tenants=("greedy",)), deployment.client("small", tenants=("small",))
    jobs = [_job(f"g{number:02}") for number in range(30)]
    assert greedy.post(f"{_JOBS}/bulk", json={"jobs": jobs}).json()["accepted"] == 30
    assert small.post(_JOBS, json=_job("s")).status_code == 202
    operations = deployment.service.operations.queues
    engine, ledger = operations._engine, operations._ledger
    assert ledger is not None
    calls: list[str] = []
    for target, name in ((engine, "get_control"), (engine, "stats"), (ledger.queries, "counts_by_queue")):
        original = getattr(target, name)

        def count(*arguments: Any, _original: Any = original, _name: str = name) -> Any:
            calls.append(_name)
            return _original(*arguments)

        monkeypatch.setattr(target, name, count)
    assert _names(small) == ["s"]
    assert sorted(calls) == ["counts_by_queue", "get_control"]
    assert _names(greedy, queue="s") == []
    assert len(_names(greedy)) == 30


def test_queues_have_pages(deployment: Deployment) -> None:
    client = deployment.client()
    jobs = [_job(f"q{number}") for number in range(5)]
    assert client.post(f"{_JOBS}/bulk", json={"jobs": jobs}).json()["accepted"] == 5
    for caller in (client, deployment.client("ann", tenants=("default",))):
        seen: list[str] = []
        after: str | None = ""
        while after is not None:
            page = caller.get(_QUEUES, params={"limit": 2} | ({"after": after} if after else {})).json()
            assert len(page["queues"]) <= 2
            seen += [queue["queue"] for queue in page["queues"]]
            after = page["next"]
        assert seen == [f"q{number}" for number in range(5)]
