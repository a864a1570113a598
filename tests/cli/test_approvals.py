"""`holdfast approvals`: votes on the command line, only with a token."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from holdfast import Holdfast
from holdfast.cli.program import program
from holdfast.core.principal import ALL_TENANTS, Principal, Role
from holdfast.operations.operations import Operations
from holdfast.testing import drain

ROOT = Principal(name="root", role=Role.ADMIN, tenants=frozenset({ALL_TENANTS}))


class Terminal:
    """The program in this process, which saves a second per call."""

    def __init__(self, url: str) -> None:
        self._url = url

    def run(self, *words: str, code: int | None = 0, token: str = "") -> Result:
        """Run to the end, and check the exit code."""
        done = CliRunner().invoke(program(words[0]), words, env={"HOLDFAST_URL": self._url, "HOLDFAST_TOKEN": token})
        if code is not None:
            assert done.exit_code == code, done.output
        return done

    def json(self, *words: str, token: str = "") -> Any:
        """The one JSON document on stdout."""
        return json.loads(self.run(*words, "--json", token=token).stdout)


class Rig:
    """An app in this process, a terminal on its database, and tokens."""

    def __init__(self, url: str) -> None:
        self.shell = Terminal(url)
        self.app = Holdfast(url)

        @self.app.task
        async def pay(amount: int) -> str:
            return f"paid {amount}"

        self.pay = pay

    def tokens(self, **principals: Role) -> dict[str, str]:
        async def make() -> dict[str, str]:
            async with self.app:
                operations = Operations.for_app(self.app).tokens
                return {
                    name: (await operations.create(ROOT, name=name, role=role, tenants=[ALL_TENANTS], expires_in=None))[
                        1
                    ]
                    for name, role in principals.items()
                }

        return asyncio.run(make())

    def hold(self, amount: int) -> str:
        async def submit() -> str:
            async with self.app:
                return (await self.pay.options(hold=True).submit(amount)).id

        return asyncio.run(submit())

    def work(self) -> None:
        async def work() -> None:
            async with self.app:
                await drain(self.app)

        asyncio.run(work())


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(f"sqlite:///{tmp_path / 'holdfast.db'}")


def get_only_request(shell: Terminal, *words: str) -> dict[str, Any]:
    found: list[dict[str, Any]] = shell.json("approvals", "list", *words)
    assert len(found) == 1
    return found[0]


def test_an_approval_request_is_listed_shown_and_approved(rig: Rig) -> None:
    shell, tokens = rig.shell, rig.tokens(ann=Role.APPROVER)
    job_id = rig.hold(101)
    request = get_only_request(shell)
    assert (request["job_id"], request["status"], request["task"]) == (job_id, "requested", "pay")
    approval_id = request["approval_id"]
    assert approval_id in shell.run("approvals", "list").stdout

    shown = shell.json("approvals", "show", approval_id)
    assert (shown["payload"], shown["state"]) == ({"amount": 101}, "waiting_approval")
    assert [event["type"] for event in shown["events"]] == ["approval.requested"]
    page = shell.run("approvals", "show", approval_id).stdout
    assert '{"amount":101}' in page
    assert "waiting for approval" in page

    output = shell.run("approvals", "approve", approval_id, "--reason", "fine", token=tokens["ann"]).stdout
    assert output.split("\t")[1] == "approved"
    rig.work()
    assert shell.json("jobs", "show", job_id)["state"] == "succeeded"
    shell.run("approvals", "list")
    decided = get_only_request(shell, "--all")
    assert (decided["status"], decided["decided_by"], decided["decision_reason"]) == ("approved", "ann", "fine")
    page = shell.run("approvals", "show", approval_id).stdout
    assert "ann" in page
    assert "approved" in page


def test_an_approval_request_is_rejected(rig: Rig) -> None:
    shell, tokens = rig.shell, rig.tokens(bob=Role.APPROVER)
    job_id = rig.hold(101)
    approval_id = get_only_request(shell)["approval_id"]
    answer = shell.json("approvals", "reject", approval_id, "--reason", "no", token=tokens["bob"])
    assert (answer["status"], answer["votes"][0]["voter"]) == ("rejected", "bob")
    assert shell.json("jobs", "show", job_id)["state"] == "cancelled"
    assert get_only_request(shell, "--status", "rejected")["approval_id"] == approval_id


def test_votes_without_permission_are_refused(rig: Rig) -> None:
    shell, tokens = rig.shell, rig.tokens(dan=Role.OPERATOR, ann=Role.APPROVER)
    rig.hold(101)
    approval_id = get_only_request(shell)["approval_id"]
    anonymous = shell.run("approvals", "approve", approval_id, code=None)
    assert anonymous.exit_code != 0
    assert "FORBIDDEN" in anonymous.stderr
    assert "HOLDFAST_TOKEN" in anonymous.stderr
    for token, word in ((tokens["dan"], "FORBIDDEN"), ("hf_x_y", "UNAUTHORIZED")):
        refused = shell.run("approvals", "approve", approval_id, code=None, token=token)
        assert refused.exit_code != 0
        assert word in refused.stderr
    missing = shell.run("approvals", "approve", "nothing", code=None, token=tokens["ann"])
    assert "NOT_FOUND" in missing.stderr
    assert get_only_request(shell)["votes"] == []


def test_without_approval_requests_the_list_is_empty(rig: Rig) -> None:
    rig.tokens()
    assert "no approval requests" in rig.shell.run("approvals", "list").stderr
    assert rig.shell.json("approvals", "list") == []
