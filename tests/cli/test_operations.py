"""Operators on the command line: tokens, dead letters, suspended jobs, controls and the audit log."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.command import ExitCode
from holdfast.core.states import State
from tests.cli.harness import Shell
from tests.cli.test_commands import InProcess
from tests.cli.test_effects import Doubtful
from tests.operations.deployment import SampleDeployment

URL = "sqlite:///{}/jobs.db"

SHOP = """
from holdfast import Holdfast
app = Holdfast()

@app.task
def charge(amount: int, currency: str = "EUR") -> None: ...
"""


class OperatorCli(InProcess):
    """The program in this process, called with the token of one principal or another."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.folder = folder
        self._monkeypatch = monkeypatch
        self.tokens: dict[str, str] = {}

    def act_as(self, name: str | None, role: str = "operator", *tenants: str) -> None:
        """Use the token of this principal from now on; None means no token."""
        self._monkeypatch.delenv("HOLDFAST_TOKEN", raising=False)
        if name is None:
            return
        if name not in self.tokens:
            words = [word for tenant in tenants for word in ("--tenant", tenant)] or ["--all-tenants"]
            self.tokens[name] = self.run("token", "create", name, "--role", role, *words).stdout.strip()
        self._monkeypatch.setenv("HOLDFAST_TOKEN", self.tokens[name])

    def dead(self, count: int = 1, **options: Any) -> list[str]:
        return asyncio.run(self._left("make_dead_letters", count, **options))

    def suspended(self, count: int = 1, **options: Any) -> list[str]:
        return asyncio.run(self._left("make_suspended", count, **options))

    def state(self, job_id: str) -> State:
        return State(self.json("jobs", "show", job_id)["state"])

    async def _left(self, what: str, count: int, **options: Any) -> list[str]:
        world = SampleDeployment(URL.format(self.folder), None, "")
        async with world.app:
            ids: list[str] = await getattr(world, what)(count, **options)
            return ids


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OperatorCli:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HOLDFAST_TOKEN", raising=False)
    monkeypatch.setenv("HOLDFAST_URL", URL.format(tmp_path))
    return OperatorCli(tmp_path, monkeypatch)


# Tokens --------------------------------------------------------------------------------------------


def test_a_token_is_shown_once(cli: OperatorCli) -> None:
    made = cli.run("token", "create", "ada", "--role", "operator", "--tenant", "a", "--tenant", "b", "--expires", "30d")
    text = made.stdout.strip()
    secret = text.split("_", 2)[2]
    listed = cli.run("token", "list")
    assert "ada\toperator\ta, b\tvalid" in listed.stdout
    (row,) = cli.json("token", "list")
    assert (row["name"], row["tenants"], row["state"], row["created_by"][:6]) == ("ada", ["a", "b"], "valid", "local:")
    assert secret not in made.stderr + listed.output + json.dumps(row)
    assert "secret_hash" not in row
    cli.run("token", "revoke", row["token_id"], "--reason", "laptop lost")
    assert cli.json("token", "list")[0]["state"] == "revoked"
    cli.run("token", "revoke", row["token_id"], code=ExitCode.ILLEGAL)
    cli.run("token", "revoke", "unknown", code=ExitCode.USAGE)
    created = cli.json("token", "create", "eve", "--role", "viewer", "--all-tenants")
    assert created["token"].startswith(f"hf_{created['token_id']}_")
    assert cli.json("token", "revoke", created["token_id"])["state"] == "revoked"


def test_invalid_token_options_are_refused(cli: OperatorCli) -> None:
    cli.run("token", "create", "ada", "--role", "king", "--all-tenants", code=ExitCode.USAGE)
    cli.run("token", "create", "ada", "--role", "viewer", code=ExitCode.USAGE)
    cli.run("token", "create", "ada", "--role", "viewer", "--tenant", "a", "--all-tenants", code=ExitCode.USAGE)
    cli.run("token", "create", "local:x", "--role", "viewer", "--all-tenants", code=ExitCode.USAGE)
    cli.run("token", "create", "ada", "--role", "viewer", "--all-tenants", "--expires", "soon", code=ExitCode.USAGE)


def test_an_unknown_token_is_refused_and_not_repeated(cli: OperatorCli, monkeypatch: pytest.MonkeyPatch) -> None:
    cli.dead()
    monkeypatch.setenv("HOLDFAST_TOKEN", "hf_0123456789abcdef_" + "s" * 43)
    refused = cli.run("dlq", "list", code=ExitCode.REFUSED)
    assert "UNAUTHORIZED" in refused.stderr
    assert "sss" not in refused.output
    assert "sss" not in cli.run("dlq", "list", "--debug", code=ExitCode.REFUSED).output
    monkeypatch.setenv("HOLDFAST_TOKEN", "")
    cli.run("dlq", "list")


def test_roles_and_tenants_come_from_the_token(cli: OperatorCli) -> None:
    (theirs,) = cli.dead(1, tenant_id="globex")
    (ours,) = cli.dead(1, tenant_id="acme")
    cli.act_as("olga", "operator", "acme")
    assert [dead_letter["dlq_id"] for dead_letter in cli.json("dlq", "list")] == [ours]
    assert "NOT_FOUND" in cli.run("dlq", "show", theirs, code=ExitCode.USAGE).stderr
    cli.run("queues", "pause", "default", code=ExitCode.REFUSED)
    (queue,) = cli.json("queues", "list")
    assert (queue["workers"], queue["dead_letters"]) == (None, None)
    cli.act_as(None)
    cli.act_as("vic", "viewer")
    cli.run("dlq", "replay", ours, code=ExitCode.REFUSED)


# Dead letters --------------------------------------------------------------------------------------


def test_dead_letters_are_listed_grouped_and_shown(cli: OperatorCli) -> None:
    ids = cli.dead(3)
    listed = [dead_letter["dlq_id"] for dead_letter in cli.json("dlq", "list")]
    assert set(listed) == set(ids)
    first = cli.run("dlq", "list", "--limit", "2")
    cursor = first.stderr.split("--cursor ")[1].strip()
    assert [dead_letter["dlq_id"] for dead_letter in cli.json("dlq", "list", "--cursor", cursor)] == listed[2:]
    assert cli.json("dlq", "list", "--text", "CARD 11")[0]["dlq_id"] == ids[1]
    for words in (
        ("--task", "other"),
        ("-q", "x"),
        ("--tenant", "x"),
        ("--code", "X"),
        ("--until", "1d"),
        ("-s", "replayed"),
    ):
        assert cli.json("dlq", "list", *words) == []
    (group,) = cli.json("dlq", "groups")
    assert (group["count"], group["task"]) == (3, "charge")
    assert len(cli.json("dlq", "list", "--fingerprint", group["fingerprint"], "--since", "1h")) == 3
    assert group["fingerprint"] in cli.run("dlq", "groups").stdout
    shown = cli.json("dlq", "show", ids[0])
    assert (shown["payload"], shown["status"]) == ({"amount": 10}, "open")
    assert shown["events"][0]["type"] == "task.created"
    assert len(shown["history"]) == 1
    text = cli.run("dlq", "show", ids[0]).stdout
    assert "card 10 refused" in text
    assert "Traceback" in text
    assert "created" in text


def test_one_dead_letter_is_replayed(cli: OperatorCli) -> None:
    one, two = cli.dead(2)
    report = cli.json("dlq", "replay", one, "--reason", "the bank is back")
    (result,) = report["results"]
    assert (report["done"], result["id"], result["done"]) == (1, one, True)
    job = cli.json("jobs", "show", result["job_id"])
    assert (job["idempotency_key"], job["payload"]) == (f"dlq:{one}:1", {"amount": 10})
    assert cli.json("dlq", "show", one)["replayed_as"] == result["job_id"]
    assert "done" in cli.run("dlq", "replay", two).stdout
    assert cli.run("dlq", "replay", two, "--dry-run").stdout == "1\twould be changed\n"
    mixed = cli.json("dlq", "replay", two, "unknown", code=ExitCode.FAILED)
    assert {result["id"]: result["code"] for result in mixed["results"]} == {
        two: "ALREADY_REPLAYED",
        "unknown": "NOT_FOUND",
    }
    assert (mixed["failed"], mixed["skipped"]) == (1, 1)


def test_a_replay_is_repeated_only_on_request(cli: OperatorCli) -> None:
    one, two, three = cli.dead(3)
    words = ("dlq", "replay", one, "--key", "order-17")
    (first,), (same,) = cli.json(*words)["results"], cli.json(*words)["results"]
    assert first["job_id"] == same["job_id"]
    assert "no new job" in cli.run(*words).stderr
    assert "REPLAY_KEY_REUSED" in cli.run("dlq", "replay", two, "--key", "order-17", code=ExitCode.USAGE).stderr
    refused = cli.run("dlq", "replay", one, code=ExitCode.ILLEGAL)
    assert first["job_id"] in refused.stderr
    assert "--again" in refused.stderr
    several = cli.json("dlq", "replay", one, two)
    assert (several["done"], several["failed"], several["skipped"]) == (1, 0, 1)
    assert [result["skipped"] for result in several["results"]] == [True, False]
    assert several["results"][0]["job_id"] == first["job_id"]
    assert cli.json("dlq", "replay", one, "--again")["results"][0]["job_id"] != first["job_id"]
    counted = cli.run("dlq", "replay", "--all", "--dry-run")
    assert (counted.stdout, "2 skipped" in counted.stderr) == ("1\twould be changed\n", True)
    assert cli.json("dlq", "replay", "--all", "--yes")["skipped"] == 2
    for wrong in ((one, two, "--key", "k"), ("--all", "--key", "k"), ("--all", "--again")):
        cli.run("dlq", "replay", *wrong, code=ExitCode.USAGE)
    assert three


def test_an_edit_is_shown_before_the_replay(cli: OperatorCli) -> None:
    (one,) = cli.dead()
    words = ("dlq", "replay", one, "--set", "amount=12", "--set", "currency=CHF")
    refused = cli.run(*words, stdin="n\n")
    assert '- /amount: 10\n+ /amount: 12\n+ /currency: "CHF"' in refused.stderr
    assert "nothing was changed" in refused.stderr
    cli.run(*words, stdin="", code=ExitCode.USAGE)
    assert cli.run(*words, "--dry-run").stdout == "1\twould be changed\n"
    assert cli.json("dlq", "show", one)["status"] == "open"
    (cli.folder / "payload.json").write_text('{"amount": 1.5}')
    (cli.folder / "shop.py").write_text(SHOP)
    invalid = cli.run("dlq", "replay", one, "--edit", "payload.json", "--app", "shop.py", code=ExitCode.USAGE)
    assert "INVALID_PAYLOAD" in invalid.stderr
    cli.run("dlq", "replay", one, "--edit", "missing.json", "--yes", code=ExitCode.USAGE)
    assert cli.json("dlq", "show", one)["status"] == "open"
    answer = cli.run(*words, stdin="y\n")
    job_id = answer.stdout.splitlines()[1].split("\t")[2]
    assert cli.json("jobs", "show", job_id)["payload"] == {"amount": 12, "currency": "CHF"}


def test_many_dead_letters_are_counted_confirmed_and_replayed(cli: OperatorCli) -> None:
    cli.dead(4)
    cli.dead(2, tenant_id="acme")
    assert cli.json("dlq", "replay", "--all", "--dry-run")["matched"] == 6
    assert "Replay 2 dead letters, 50 a second?" in cli.run("dlq", "replay", "--tenant", "acme", stdin="n\n").stderr
    assert len(cli.json("dlq", "list", "--status", "open")) == 6
    report = cli.json("dlq", "replay", "--tenant", "acme", "--rate", "1000/s", "--yes")
    assert (report["matched"], report["done"]) == (2, 2)
    assert "4 done, 0 failed" in cli.run("dlq", "replay", "--all", "--yes", "--rate", "200").stderr
    assert cli.json("dlq", "replay", "--all", "--yes")["matched"] == 0
    for words in ((), ("--all", "x"), ("--task", "charge", "x"), ("--set", "a=1", "--all"), ("", "--yes")):
        cli.run("dlq", "replay", *words, code=ExitCode.USAGE)
    for rate in ("0", "x", "5/y", "-1", "inf"):
        cli.run("dlq", "replay", "--all", f"--rate={rate}", code=ExitCode.USAGE)


def test_a_discard_needs_two_operators(cli: OperatorCli) -> None:
    (one, two) = cli.dead(2)
    assert "HOLDFAST_TOKEN" in cli.run("dlq", "discard", one, "--reason", "old", code=ExitCode.REFUSED).stderr
    cli.act_as("ada")
    cli.run("dlq", "discard", one, code=ExitCode.USAGE)
    cli.run("dlq", "discard", one, "--reason", "customer withdrew")
    assert "another person" in cli.run("dlq", "confirm", one, code=ExitCode.REFUSED).stderr
    cli.run("dlq", "replay", one, code=ExitCode.ILLEGAL)
    cli.act_as(None)
    cli.run("dlq", "confirm", one, code=ExitCode.REFUSED)
    cli.act_as("bob")
    cli.run("dlq", "confirm", one)
    dead_letter = cli.json("dlq", "show", one)
    assert (dead_letter["status"], dead_letter["requested_by"], dead_letter["confirmed_by"], dead_letter["reason"]) == (
        "discarded", "ada", "bob", "customer withdrew",
    )  # fmt: skip
    cli.run("dlq", "replay", one, code=ExitCode.ILLEGAL)
    # Many, with a dry run first.
    assert cli.json("dlq", "discard", "--all", "--reason", "old", "--dry-run")["matched"] == 1
    assert cli.json("dlq", "discard", "--task", "charge", "--reason", "old", "--yes")["done"] == 1
    assert cli.json("dlq", "keep", two, "--reason", "wait")["done"] == 1
    cli.run("dlq", "keep", two, code=ExitCode.ILLEGAL)
    cli.run("dlq", "discard", two, "--reason", "old")
    assert cli.json("dlq", "confirm", "--all", "--yes", code=ExitCode.FAILED)["results"][0]["code"] == "FORBIDDEN"
    cli.act_as("ada")
    assert cli.json("dlq", "confirm", "--all", "--yes")["done"] == 1


# Suspended jobs ------------------------------------------------------------------------------------


def test_suspended_jobs_are_listed_resumed_and_discarded(cli: OperatorCli) -> None:
    one, two, three = cli.suspended(3)
    assert [job["job_id"] for job in cli.json("suspended", "list")] == [three, two, one]
    assert "fetch" in cli.run("suspended", "list").stdout
    assert cli.json("suspended", "list", "--text", "nothing such") == []
    assert cli.json("suspended", "show", one)["failure"]["message"] == "it is not there"
    assert "it is not there" in cli.run("suspended", "show", one).stdout
    assert cli.json("suspended", "resume", one, "--reason", "there now")["done"] == 1
    assert cli.state(one) is State.QUEUED
    cli.run("suspended", "show", one, code=ExitCode.ILLEGAL)
    assert cli.json("suspended", "resume", one, code=ExitCode.FAILED)["results"][0]["code"].startswith("WF_STATE")
    assert cli.json("suspended", "resume", "--all", "--dry-run")["matched"] == 2
    assert "Resume 2 suspended jobs?" in cli.run("suspended", "resume", "--task", "fetch", stdin="n\n").stderr
    cli.run("suspended", "discard", two, code=ExitCode.USAGE)
    assert cli.json("suspended", "discard", two, "--reason", "old")["done"] == 1
    assert cli.state(two) is State.CANCELLED
    assert cli.json("suspended", "resume", "--all", "--yes")["done"] == 1
    assert cli.json("suspended", "discard", "--all", "--reason", "x", "--yes")["matched"] == 0
    cli.run("suspended", "resume", code=ExitCode.USAGE)


# Queues, jobs, and the audit log -------------------------------------------------------------------


def test_controls_and_the_audit_log(cli: OperatorCli) -> None:
    job_id = cli.submit("charge", "--arg", "amount=1", "--delay", "1h")
    cli.act_as("ada")
    assert cli.run("queues", "pause", "default", "--reason", "moving").stdout == "default\tpaused\n"
    cli.run("queues", "limit", "default", "100")
    assert "concurrency 5" in cli.run("queues", "concurrency", "default", "5").stdout
    assert "worker concurrency 7" in cli.run("queues", "worker-concurrency", "default", "7").stdout
    cli.run("queues", "alert", "default", "50")
    (control,) = cli.json("queues", "tenant", "default", "acme", "--weight", "3", "--limit", "10")
    assert control == {
        "queue": "default",
        "paused": True,
        "intake_paused": False,
        "concurrency": 5,
        "worker_concurrency": 7,
        "intake_limit": 100,
        "backlog_alert": 50,
        "tenants": {"acme": {"weight": 3, "concurrency": None, "intake_limit": 10}},
    }
    assert "tenant acme: weight 3 intake limit 10" in cli.run("queues", "list").stdout
    cli.run("queues", "limit", "default", "none")
    assert cli.json("queues", "list")[0]["intake_limit"] is None
    for words in (
        ("limit", "default", "many"),
        ("concurrency", "default", "-1"),
        ("worker-concurrency", "default", "x"),
        ("tenant", "default", "acme"),
        ("pause", "a b"),
    ):
        cli.run("queues", *words, code=ExitCode.USAGE)
    assert cli.run("jobs", "retry", job_id, "--reason", "urgent").stdout == f"{job_id}\tqueued → due now\n"
    cli.run("jobs", "cancel", job_id, "--reason", "withdrawn")
    cli.run("jobs", "retry", job_id, code=ExitCode.ILLEGAL)
    entries = cli.json("log")
    assert [entry["type"].removeprefix("operator.") for entry in entries] == [
        "cancel", "retry", "limit", "tenant", "alert", "worker_concurrency", "concurrency", "limit", "pause",
        "token_create",
    ]  # fmt: skip
    assert {entry["actor"] for entry in entries[:-1]} == {"ada"}
    (pause,) = cli.json("log", "--type", "operator.pause")
    assert (pause["reason"], pause["target"], pause["target_id"]) == ("moving", "queue", "default")
    assert pause["after"]["paused"] is True
    assert len(cli.json("log", "--target", "job", "--id", job_id, "--actor", "ada", "--since", "1h")) == 2
    assert cli.json("log", "--actor", "unknown") == []
    answer = cli.run("log", "--limit", "1")
    assert f"operator.cancel\tjob {job_id}" in answer.stdout
    assert "--cursor" in answer.stderr


@pytest.mark.redis
def test_on_redis_alone_the_errors_name_the_missing_setting(
    cli: OperatorCli, redis_url: str, namespace: str, monkeypatch: Any
) -> None:
    monkeypatch.setenv("HOLDFAST_URL", redis_url)
    monkeypatch.setenv("HOLDFAST_NAMESPACE", namespace)
    job_id = cli.submit("charge", "--arg", "amount=1", "--queue", "far")
    for words in (
        ("dlq", "list"),
        ("token", "list"),
        ("log",),
        ("token", "create", "a", "--role", "viewer", "--all-tenants"),
    ):
        refused = cli.run(*words, code=ExitCode.USAGE)
        assert "NO_LEDGER" in refused.stderr
        assert "HOLDFAST_LEDGER" in refused.stderr
    assert cli.json("suspended", "list") == []
    cli.run("queues", "pause", "far")
    cli.run("jobs", "cancel", job_id)
    monkeypatch.setenv("HOLDFAST_TOKEN", "hf_0123456789abcdef_" + "s" * 43)
    assert "NO_LEDGER" in cli.run("queues", "list", code=ExitCode.USAGE).stderr


# Reading jobs --------------------------------------------------------------------------------------


def test_a_token_limits_every_read_of_jobs(cli: OperatorCli) -> None:
    (mine,) = cli.suspended(1, tenant_id="acme")
    (other,) = cli.suspended(1, tenant_id="globex")
    cli.act_as("ann", "viewer", "acme")
    assert [job["job_id"] for job in cli.json("jobs", "list")] == [mine]
    assert cli.json("jobs", "list", "--tenant", "globex") == []
    assert cli.json("jobs", "counts")["states"]["suspended"] == 1
    assert cli.json("jobs", "counts", "--tenant", "globex")["states"]["suspended"] == 0
    cli.run("jobs", "show", mine)
    cli.run("explain", mine)
    for words in (("jobs", "show"), ("explain",)):
        for tenant in ((), ("--tenant", "globex")):
            assert "UNKNOWN_JOB" in cli.run(*words, other, *tenant, code=ExitCode.USAGE).stderr
    cli.act_as("both", "viewer", "acme", "globex")
    assert cli.json("jobs", "counts")["states"]["suspended"] == 2


def test_the_resolution_of_an_effect_is_in_the_audit_log(cli: OperatorCli) -> None:
    """Requirement H6: actor, reason, before and after; another tenant's effect is not found."""
    job_id = asyncio.run(Doubtful(Shell(cli.folder, {"HOLDFAST_URL": URL.format(cli.folder)})).submit())
    command = ("effects", "resolve", "publish:1", "--done", '{"url": "seen"}', "--reason", "it is on the site")
    cli.act_as("eve", "admin", "other")
    assert "not found; see `holdfast effects list`" in cli.run(*command, code=ExitCode.USAGE).stderr
    assert cli.json("effects", "list") == []
    cli.act_as(None)
    cli.act_as("vic", "viewer")
    cli.run(*command, code=ExitCode.REFUSED)
    cli.act_as(None)
    assert cli.json("log", "--type", "operator.resolve_effect") == []
    cli.act_as("ada", "operator", "default")
    cli.run(*command)
    (entry,) = cli.json("log", "--type", "operator.resolve_effect")
    assert (entry["actor"], entry["target"], entry["target_id"]) == ("ada", "effect", "publish:1")
    assert (entry["reason"], entry["before"]["state"]) == ("it is on the site", "in_doubt")
    assert entry["after"] == {"state": "done", "job_id": job_id, "value": {"url": "seen"}}
    (resumed,) = cli.json("log", "--type", "operator.resume")
    assert (resumed["actor"], resumed["target_id"]) == ("ada", job_id)


def test_the_error_says_why_a_token_is_refused(cli: OperatorCli, monkeypatch: pytest.MonkeyPatch) -> None:
    cli.suspended(1)
    monkeypatch.setenv("HOLDFAST_TOKEN", "hf_nonsense")
    errors = cli.run("jobs", "list", code=ExitCode.REFUSED).stderr
    assert "(missing, malformed, expired or revoked)" in errors
