"""What a token does not see, and when it ends: queue-wide audit entries, open streams and waits (H6)."""

from __future__ import annotations

import time
from collections.abc import Callable

from holdfast.core.principal import Role
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
