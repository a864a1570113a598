"""People at a terminal: tokens, dead letters, suspended jobs, controls and the log, from the command line."""

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


class Desk(InProcess):
    """A terminal, somebody at it, and what was left there."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.folder = folder
        self._monkeypatch = monkeypatch
        self.tokens: dict[str, str] = {}

    def sit(self, name: str | None, role: str = "operator", *tenants: str) -> None:
        """Somebody else takes over; None is whoever has no token."""
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
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HOLDFAST_TOKEN", raising=False)
    monkeypatch.setenv("HOLDFAST_URL", URL.format(tmp_path))
    return Desk(tmp_path, monkeypatch)


# Tokens --------------------------------------------------------------------------------------------


def test_a_token_is_shown_once(desk: Desk) -> None:
    made = desk.run(
        "token", "create", "ada", "--role", "operator", "--tenant", "a", "--tenant", "b", "--expires", "30d"
    )
    text = made.stdout.strip()
    secret = text.split("_", 2)[2]
    listed = desk.run("token", "list")
    assert "ada\toperator\ta, b\tvalid" in listed.stdout
    (row,) = desk.json("token", "list")
    assert (row["name"], row["tenants"], row["state"], row["created_by"][:6]) == ("ada", ["a", "b"], "valid", "local:")
    assert secret not in made.stderr + listed.output + json.dumps(row)
    assert "secret_hash" not in row
    desk.run("token", "revoke", row["token_id"], "--reason", "laptop lost")
    assert desk.json("token", "list")[0]["state"] == "revoked"
    desk.run("token", "revoke", row["token_id"], code=ExitCode.ILLEGAL)
    desk.run("token", "revoke", "nobody", code=ExitCode.USAGE)
    told = desk.json("token", "create", "eve", "--role", "viewer", "--all-tenants")
    assert told["token"].startswith(f"hf_{told['token_id']}_")
    assert desk.json("token", "revoke", told["token_id"])["state"] == "revoked"


def test_wrong_words_about_tokens(desk: Desk) -> None:
    desk.run("token", "create", "ada", "--role", "king", "--all-tenants", code=ExitCode.USAGE)
    desk.run("token", "create", "ada", "--role", "viewer", code=ExitCode.USAGE)
    desk.run("token", "create", "ada", "--role", "viewer", "--tenant", "a", "--all-tenants", code=ExitCode.USAGE)
    desk.run("token", "create", "local:x", "--role", "viewer", "--all-tenants", code=ExitCode.USAGE)
    desk.run("token", "create", "ada", "--role", "viewer", "--all-tenants", "--expires", "soon", code=ExitCode.USAGE)


def test_a_token_that_is_none_is_refused_and_not_repeated(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.dead()
    monkeypatch.setenv("HOLDFAST_TOKEN", "hf_0123456789abcdef_" + "s" * 43)
    refused = desk.run("dlq", "list", code=ExitCode.REFUSED)
    assert "UNAUTHORIZED" in refused.stderr
    assert "sss" not in refused.output
    assert "sss" not in desk.run("dlq", "list", "--debug", code=ExitCode.REFUSED).output
    monkeypatch.setenv("HOLDFAST_TOKEN", "")
    desk.run("dlq", "list")


def test_roles_and_tenants_come_from_the_token(desk: Desk) -> None:
    (theirs,) = desk.dead(1, tenant_id="globex")
    (ours,) = desk.dead(1, tenant_id="acme")
    desk.sit("olga", "operator", "acme")
    assert [letter["dlq_id"] for letter in desk.json("dlq", "list")] == [ours]
    assert "NOT_FOUND" in desk.run("dlq", "show", theirs, code=ExitCode.USAGE).stderr
    desk.run("queues", "pause", "default", code=ExitCode.REFUSED)
    (queue,) = desk.json("queues", "list")
    assert (queue["workers"], queue["dead_letters"]) == (None, None)
    desk.sit(None)
    desk.sit("vic", "viewer")
    desk.run("dlq", "replay", ours, code=ExitCode.REFUSED)


# Dead letters --------------------------------------------------------------------------------------


def test_letters_are_listed_grouped_and_shown(desk: Desk) -> None:
    ids = desk.dead(3)
    listed = [letter["dlq_id"] for letter in desk.json("dlq", "list")]
    assert set(listed) == set(ids)
    first = desk.run("dlq", "list", "--limit", "2")
    cursor = first.stderr.split("--cursor ")[1].strip()
    assert [letter["dlq_id"] for letter in desk.json("dlq", "list", "--cursor", cursor)] == listed[2:]
    assert desk.json("dlq", "list", "--text", "CARD 11")[0]["dlq_id"] == ids[1]
    for words in (
        ("--task", "other"),
        ("-q", "x"),
        ("--tenant", "x"),
        ("--code", "X"),
        ("--until", "1d"),
        ("-s", "replayed"),
    ):
        assert desk.json("dlq", "list", *words) == []
    (group,) = desk.json("dlq", "groups")
    assert (group["count"], group["task"]) == (3, "charge")
    assert len(desk.json("dlq", "list", "--fingerprint", group["fingerprint"], "--since", "1h")) == 3
    assert group["fingerprint"] in desk.run("dlq", "groups").stdout
    shown = desk.json("dlq", "show", ids[0])
    assert (shown["payload"], shown["status"]) == ({"amount": 10}, "open")
    assert shown["events"][0]["type"] == "task.created"
    assert len(shown["history"]) == 1
    text = desk.run("dlq", "show", ids[0]).stdout
    assert "card 10 refused" in text
    assert "Traceback" in text
    assert "created" in text


def test_one_is_replayed(desk: Desk) -> None:
    one, two = desk.dead(2)
    report = desk.json("dlq", "replay", one, "--reason", "the bank is back")
    (result,) = report["results"]
    assert (report["done"], result["id"], result["done"]) == (1, one, True)
    job = desk.json("jobs", "show", result["job_id"])
    assert (job["idempotency_key"], job["payload"]) == (f"dlq:{one}:1", {"amount": 10})
    assert desk.json("dlq", "show", one)["replayed_as"] == result["job_id"]
    assert "done" in desk.run("dlq", "replay", two).stdout
    assert desk.run("dlq", "replay", two, "--dry-run").stdout == "1\twould be changed\n"
    mixed = desk.json("dlq", "replay", two, "nobody", code=ExitCode.FAILED)
    assert {result["id"]: result["code"] for result in mixed["results"]} == {two: None, "nobody": "NOT_FOUND"}


def test_an_edit_is_shown_before_anything_is_done(desk: Desk) -> None:
    (one,) = desk.dead()
    words = ("dlq", "replay", one, "--set", "amount=12", "--set", "currency=CHF")
    refused = desk.run(*words, stdin="n\n")
    assert '- /amount: 10\n+ /amount: 12\n+ /currency: "CHF"' in refused.stderr
    assert "nothing was changed" in refused.stderr
    desk.run(*words, stdin="", code=ExitCode.USAGE)
    assert desk.run(*words, "--dry-run").stdout == "1\twould be changed\n"
    assert desk.json("dlq", "show", one)["status"] == "open"
    (desk.folder / "payload.json").write_text('{"amount": 1.5}')
    (desk.folder / "shop.py").write_text(SHOP)
    misfit = desk.run("dlq", "replay", one, "--edit", "payload.json", "--app", "shop.py", code=ExitCode.USAGE)
    assert "INVALID_PAYLOAD" in misfit.stderr
    desk.run("dlq", "replay", one, "--edit", "missing.json", "--yes", code=ExitCode.USAGE)
    assert desk.json("dlq", "show", one)["status"] == "open"
    answer = desk.run(*words, stdin="y\n")
    job_id = answer.stdout.splitlines()[1].split("\t")[2]
    assert desk.json("jobs", "show", job_id)["payload"] == {"amount": 12, "currency": "CHF"}


def test_many_are_counted_asked_about_and_replayed(desk: Desk) -> None:
    desk.dead(4)
    desk.dead(2, tenant_id="acme")
    assert desk.json("dlq", "replay", "--all", "--dry-run")["matched"] == 6
    assert "Replay 2 dead letters, 50 a second?" in desk.run("dlq", "replay", "--tenant", "acme", stdin="n\n").stderr
    assert len(desk.json("dlq", "list", "--status", "open")) == 6
    report = desk.json("dlq", "replay", "--tenant", "acme", "--rate", "1000/s", "--yes")
    assert (report["matched"], report["done"]) == (2, 2)
    assert "4 done, 0 failed" in desk.run("dlq", "replay", "--all", "--yes", "--rate", "200").stderr
    assert desk.json("dlq", "replay", "--all", "--yes")["matched"] == 0
    for words in ((), ("--all", "x"), ("--task", "charge", "x"), ("--set", "a=1", "--all"), ("", "--yes")):
        desk.run("dlq", "replay", *words, code=ExitCode.USAGE)
    for rate in ("0", "x", "5/y", "-1", "inf"):
        desk.run("dlq", "replay", "--all", f"--rate={rate}", code=ExitCode.USAGE)


def test_two_people_discard(desk: Desk) -> None:
    (one, two) = desk.dead(2)
    assert "HOLDFAST_TOKEN" in desk.run("dlq", "discard", one, "--reason", "old", code=ExitCode.REFUSED).stderr
    desk.sit("ada")
    desk.run("dlq", "discard", one, code=ExitCode.USAGE)
    desk.run("dlq", "discard", one, "--reason", "customer withdrew")
    assert "another person" in desk.run("dlq", "confirm", one, code=ExitCode.REFUSED).stderr
    desk.run("dlq", "replay", one, code=ExitCode.ILLEGAL)
    desk.sit(None)
    desk.run("dlq", "confirm", one, code=ExitCode.REFUSED)
    desk.sit("bob")
    desk.run("dlq", "confirm", one)
    letter = desk.json("dlq", "show", one)
    assert (letter["status"], letter["requested_by"], letter["confirmed_by"], letter["reason"]) == (
        "discarded", "ada", "bob", "customer withdrew",
    )  # fmt: skip
    desk.run("dlq", "replay", one, code=ExitCode.ILLEGAL)
    # Many, with a look first.
    assert desk.json("dlq", "discard", "--all", "--reason", "old", "--dry-run")["matched"] == 1
    assert desk.json("dlq", "discard", "--task", "charge", "--reason", "old", "--yes")["done"] == 1
    assert desk.json("dlq", "keep", two, "--reason", "wait")["done"] == 1
    desk.run("dlq", "keep", two, code=ExitCode.ILLEGAL)
    desk.run("dlq", "discard", two, "--reason", "old")
    assert desk.json("dlq", "confirm", "--all", "--yes", code=ExitCode.FAILED)["results"][0]["code"] == "FORBIDDEN"
    desk.sit("ada")
    assert desk.json("dlq", "confirm", "--all", "--yes")["done"] == 1


# Suspended jobs ------------------------------------------------------------------------------------


def test_suspended_jobs_are_seen_resumed_and_given_up(desk: Desk) -> None:
    one, two, three = desk.suspended(3)
    assert [job["job_id"] for job in desk.json("suspended", "list")] == [three, two, one]
    assert "fetch" in desk.run("suspended", "list").stdout
    assert desk.json("suspended", "list", "--text", "nothing such") == []
    assert desk.json("suspended", "show", one)["failure"]["message"] == "it is not there"
    assert "it is not there" in desk.run("suspended", "show", one).stdout
    assert desk.json("suspended", "resume", one, "--reason", "there now")["done"] == 1
    assert desk.state(one) is State.QUEUED
    desk.run("suspended", "show", one, code=ExitCode.ILLEGAL)
    assert desk.json("suspended", "resume", one, code=ExitCode.FAILED)["results"][0]["code"].startswith("WF_STATE")
    assert desk.json("suspended", "resume", "--all", "--dry-run")["matched"] == 2
    assert "Resume 2 suspended jobs?" in desk.run("suspended", "resume", "--task", "fetch", stdin="n\n").stderr
    desk.run("suspended", "discard", two, code=ExitCode.USAGE)
    assert desk.json("suspended", "discard", two, "--reason", "old")["done"] == 1
    assert desk.state(two) is State.CANCELLED
    assert desk.json("suspended", "resume", "--all", "--yes")["done"] == 1
    assert desk.json("suspended", "discard", "--all", "--reason", "x", "--yes")["matched"] == 0
    desk.run("suspended", "resume", code=ExitCode.USAGE)


# Queues, jobs, and the log -------------------------------------------------------------------------


def test_controls_and_the_log(desk: Desk) -> None:
    job_id = desk.submit("charge", "--arg", "amount=1", "--delay", "1h")
    desk.sit("ada")
    assert desk.run("queues", "pause", "default", "--reason", "moving").stdout == "default\tpaused\n"
    desk.run("queues", "limit", "default", "100")
    desk.run("queues", "concurrency", "default", "5")
    desk.run("queues", "alert", "default", "50")
    (control,) = desk.json("queues", "tenant", "default", "acme", "--weight", "3", "--limit", "10")
    assert control == {
        "queue": "default",
        "paused": True,
        "intake_paused": False,
        "concurrency": 5,
        "intake_limit": 100,
        "backlog_alert": 50,
        "tenants": {"acme": {"weight": 3, "concurrency": None, "intake_limit": 10}},
    }
    assert "tenant acme: weight 3 intake limit 10" in desk.run("queues", "list").stdout
    desk.run("queues", "limit", "default", "none")
    assert desk.json("queues", "list")[0]["intake_limit"] is None
    for words in (
        ("limit", "default", "many"),
        ("concurrency", "default", "-1"),
        ("tenant", "default", "acme"),
        ("pause", "a b"),
    ):
        desk.run("queues", *words, code=ExitCode.USAGE)
    assert desk.run("jobs", "retry", job_id, "--reason", "hurry").stdout == f"{job_id}\tqueued → due now\n"
    desk.run("jobs", "cancel", job_id, "--reason", "withdrawn")
    desk.run("jobs", "retry", job_id, code=ExitCode.ILLEGAL)
    lines = desk.json("log")
    assert [line["type"].removeprefix("operator.") for line in lines] == [
        "cancel", "retry", "limit", "tenant", "alert", "concurrency", "limit", "pause", "token_create",
    ]  # fmt: skip
    assert {line["actor"] for line in lines[:-1]} == {"ada"}
    (pause,) = desk.json("log", "--type", "operator.pause")
    assert (pause["reason"], pause["target"], pause["target_id"]) == ("moving", "queue", "default")
    assert pause["after"]["paused"] is True
    assert len(desk.json("log", "--target", "job", "--id", job_id, "--actor", "ada", "--since", "1h")) == 2
    assert desk.json("log", "--actor", "nobody") == []
    told = desk.run("log", "--limit", "1")
    assert f"operator.cancel\tjob {job_id}" in told.stdout
    assert "--cursor" in told.stderr


@pytest.mark.redis
def test_on_redis_alone_the_rest_says_what_to_do(desk: Desk, redis_url: str, namespace: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("HOLDFAST_URL", redis_url)
    monkeypatch.setenv("HOLDFAST_NAMESPACE", namespace)
    job_id = desk.submit("charge", "--arg", "amount=1", "--queue", "far")
    for words in (
        ("dlq", "list"),
        ("token", "list"),
        ("log",),
        ("token", "create", "a", "--role", "viewer", "--all-tenants"),
    ):
        refused = desk.run(*words, code=ExitCode.USAGE)
        assert "NO_LEDGER" in refused.stderr
        assert "HOLDFAST_LEDGER" in refused.stderr
    assert desk.json("suspended", "list") == []
    desk.run("queues", "pause", "far")
    desk.run("jobs", "cancel", job_id)
    monkeypatch.setenv("HOLDFAST_TOKEN", "hf_0123456789abcdef_" + "s" * 43)
    assert "NO_LEDGER" in desk.run("queues", "list", code=ExitCode.USAGE).stderr


# Looking at jobs -----------------------------------------------------------------------------------


def test_a_token_narrows_every_look_at_jobs(desk: Desk) -> None:
    (mine,) = desk.suspended(1, tenant_id="acme")
    (other,) = desk.suspended(1, tenant_id="globex")
    desk.sit("ann", "viewer", "acme")
    assert [job["job_id"] for job in desk.json("jobs", "list")] == [mine]
    assert desk.json("jobs", "list", "--tenant", "globex") == []
    assert desk.json("jobs", "counts")["states"]["suspended"] == 1
    assert desk.json("jobs", "counts", "--tenant", "globex")["states"]["suspended"] == 0
    desk.run("jobs", "show", mine)
    desk.run("explain", mine)
    for words in (("jobs", "show"), ("explain",)):
        for tenant in ((), ("--tenant", "globex")):
            assert "UNKNOWN_JOB" in desk.run(*words, other, *tenant, code=ExitCode.USAGE).stderr
    desk.sit("both", "viewer", "acme", "globex")
    assert desk.json("jobs", "counts")["states"]["suspended"] == 2


def test_a_word_on_an_effect_is_its_persons_and_in_the_log(desk: Desk) -> None:
    """Requirement H6: who, why, before and after; another tenant's effect is not there."""
    job_id = asyncio.run(Doubtful(Shell(desk.folder, {"HOLDFAST_URL": URL.format(desk.folder)})).submit())
    word = ("effects", "resolve", "publish:1", "--done", '{"url": "seen"}', "--reason", "it is on the site")
    desk.sit("eve", "admin", "other")
    assert "not found; see `holdfast effects list`" in desk.run(*word, code=ExitCode.USAGE).stderr
    assert desk.json("effects", "list") == []
    desk.sit(None)
    desk.sit("looker", "viewer")
    desk.run(*word, code=ExitCode.REFUSED)
    desk.sit(None)
    assert desk.json("log", "--type", "operator.resolve_effect") == []
    desk.sit("ada", "operator", "default")
    desk.run(*word)
    (line,) = desk.json("log", "--type", "operator.resolve_effect")
    assert (line["actor"], line["target"], line["target_id"]) == ("ada", "effect", "publish:1")
    assert (line["reason"], line["before"]["state"]) == ("it is on the site", "in_doubt")
    assert line["after"] == {"state": "done", "job_id": job_id, "value": {"url": "seen"}}
    (resumed,) = desk.json("log", "--type", "operator.resume")
    assert (resumed["actor"], resumed["target_id"]) == ("ada", job_id)


def test_why_a_token_is_refused_can_be_read(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.suspended(1)
    monkeypatch.setenv("HOLDFAST_TOKEN", "hf_nonsense")
    told = desk.run("jobs", "list", code=ExitCode.REFUSED).stderr
    assert "(missing, malformed, expired or revoked)" in told
