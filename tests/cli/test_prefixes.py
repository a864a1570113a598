"""A prefix of an id on the command line: it must be unique among visible tenants, and needs a ledger."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest
from redis import Redis

from holdfast.cli.command import ExitCode
from holdfast.core.job import Envelope
from holdfast.core.states import State
from holdfast.execution.backend import backend_of
from tests.cli.deployments import PAIRS, Deployment, deployed
from tests.operations.deployment import SampleDeployment

#: As holdfast makes them: twelve digits of the millisecond, a seven, and the rest at random.
FIRST: Final = "01a1e55a882077dba816af8e2802b8a1"
SAME_MS: Final = "01a1e55a882078c098ea6ba7c28835c2"
OF_ACME: Final = "01a1e55a882079d098ea6ba7c28835c2"
#: Whole ids that other programs chose.
SHORT: Final = "01a1e55b0000"
LONGER: Final = "01a1e55b0000-and-more"
ODD: Final = "100%_'\"*[a-z]?\\"


@pytest.fixture(params=PAIRS)
def at(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Deployment:
    deployment = deployed(request.param, request, tmp_path, monkeypatch)
    deployment.do(_fill)
    return deployment


async def _fill(world: SampleDeployment) -> None:
    ids = {FIRST: "default", SAME_MS: "default", OF_ACME: "acme", SHORT: "default", LONGER: "default", ODD: "default"}
    for job_id, tenant in ids.items():
        envelope = Envelope(
            job_id=job_id, task="charge", payload=b'{"amount": 1}', tenant_id=tenant, delay_ms=3_600_000
        )
        await (await backend_of(world.app).connections.submitter()).submit(envelope)


def test_prefixes_of_jobs(at: Deployment) -> None:
    """One deployment for all cases, because each takes a second to make."""
    # Unique: for reads and for moves.
    for prefix in (FIRST[:13] + "7d", FIRST[:-1]):
        assert at.json("jobs", "show", prefix)["job_id"] == FIRST
        assert at.json("explain", prefix)["job_id"] == FIRST
    assert f"{FIRST}\tqueued → due now" in at.run("jobs", "retry", FIRST[:16]).stdout
    assert "queued" in at.run("suspended", "show", FIRST[:16], code=ExitCode.ILLEGAL).stderr
    # A whole id wins, although another one begins with it.
    assert at.json("jobs", "show", SHORT)["job_id"] == SHORT
    assert at.json("jobs", "show", SHORT + "-")["job_id"] == LONGER
    # Ambiguous: nothing is changed, and all candidates are listed with their differences.
    refused = at.run("jobs", "cancel", FIRST[:12], code=ExitCode.USAGE)
    assert refused.stdout == ""
    *listed, error = refused.stderr.splitlines()
    assert error == (
        f"holdfast: AMBIGUOUS_ID: '{FIRST[:12]}' is a prefix of 3 job ids; give more characters, or the whole id"
    )
    assert [line.split("\t")[:3] for line in listed] == [
        ["job", "task", "state"],
        [FIRST, "charge", "queued"],
        [SAME_MS, "charge", "queued"],
        [OF_ACME, "charge", "queued"],
    ]
    assert at.json("jobs", "show", SAME_MS)["state"] == State.QUEUED
    # A tenant that is named narrows it down.
    assert at.json("jobs", "show", FIRST[:12], "--tenant", "acme")["job_id"] == OF_ACME
    assert at.json("jobs", "cancel", FIRST[:16])[0]["job_id"] == FIRST
    # Too short, in upper case, in another queue, several at once.
    short = at.run("jobs", "show", SHORT[:11], code=ExitCode.USAGE).stderr
    assert "UNKNOWN_JOB" in short
    assert "at least 12 characters" in short
    for words in ((FIRST[:20].upper(),), (FIRST[:20], "--queue", "other"), (FIRST[:20], SAME_MS[:20])):
        assert "UNKNOWN_JOB" in at.run("jobs", "cancel", *words, code=ExitCode.USAGE).stderr
    # Hostile text is data.
    assert at.json("jobs", "show", ODD[:12])["job_id"] == ODD
    for text in ("%" * 12, "_" * 12, "01a1e55a____", "' OR 1=1 --'", "\x1b[31m" * 3, "x" * 100_000):
        for words in (("jobs", "show"), ("jobs", "cancel"), ("explain",)):
            answer = at.run(*words, "--", text, code=ExitCode.USAGE)
            assert "UNKNOWN_JOB" in answer.stderr
            assert "\x1b" not in answer.output
    assert "is not UTF-8 text" in at.run("jobs", "cancel", "\udcff" * 12, code=ExitCode.USAGE).stderr
    assert "is not UTF-8 text" in at.run("jobs", "cancel", FIRST, "\udcff" * 12, code=ExitCode.USAGE).stderr


def test_other_tenants_ids_neither_match_nor_count(at: Deployment) -> None:
    at.act_as("olga", "operator", "acme")
    assert at.json("jobs", "show", FIRST[:12])["job_id"] == OF_ACME
    assert at.json("explain", FIRST[:12])["job_id"] == OF_ACME
    for words in ((SAME_MS[:16],), (FIRST[:12], "--tenant", "default")):
        answer = at.run("jobs", "show", *words, code=ExitCode.USAGE)
        assert "UNKNOWN_JOB" in answer.stderr
        assert SAME_MS not in answer.output
    assert at.json("jobs", "cancel", FIRST[:12])[0]["job_id"] == OF_ACME


@pytest.mark.redis
def test_without_a_ledger_prefixes_are_refused_and_nothing_is_scanned(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = deployed("redis", request, tmp_path, monkeypatch)
    at.do(_fill)
    with Redis.from_url(at.url) as client, client.monitor() as monitor:
        for words in (("jobs", "show", FIRST[:16]), ("jobs", "cancel", FIRST[:16]), ("jobs", "show", "x")):
            answer = at.run(*words, code=ExitCode.USAGE)
            assert "UNKNOWN_JOB" in answer.stderr
            assert "without a ledger a prefix cannot be resolved; pass the full id" in answer.stderr
        assert at.json("jobs", "show", FIRST)["state"] == State.QUEUED
        client.ping()
        commands = []
        while (command := monitor.next_command())["command"] != "PING":
            commands.append(command["command"])
    assert not [one for one in commands if one.split()[0].upper() in ("SCAN", "KEYS")]
    assert any(FIRST[:16] in one for one in commands)
    unknown = at.run("jobs", "show", "0" * 32, code=ExitCode.USAGE).stderr
    assert "no ledger" not in unknown


def test_many_candidates_are_not_all_listed(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = deployed("embedded", request, tmp_path, monkeypatch)

    async def submit(world: SampleDeployment) -> str:
        jobs = await world.charge.submit_many([(number,) for number in range(30)])
        assert len({job.id[:12] for job in jobs}) == 1
        return jobs[0].id[:12]

    answer = at.run("jobs", "retry", at.do(submit), code=ExitCode.USAGE)
    assert "more than 10 job ids" in answer.stderr
    assert len(answer.stderr.splitlines()) == 12


def test_prefixes_of_dead_letters_and_approvals(at: Deployment) -> None:
    async def leave(world: SampleDeployment) -> tuple[list[str], str]:
        held = await world.charge.options(hold=True).submit(1)
        ask = (await held.info()).meta.approval_request
        assert ask is not None
        return await world.make_dead_letters(2), ask.approval_id

    (dead_letter, other), approval = at.do(leave)
    prefix = _unique_prefix(dead_letter, other)
    assert at.json("dlq", "show", prefix)["dlq_id"] == dead_letter
    assert at.json("dlq", "replay", prefix)["results"][0]["id"] == dead_letter
    assert at.json("approvals", "show", approval[:14])["approval_id"] == approval
    assert "at least 12" in at.run("approvals", "show", approval[:11], code=ExitCode.USAGE).stderr
    at.act_as("ann", "approver")
    assert at.json("approvals", "reject", approval[:14], "--reason", "no")["status"] == "rejected"
    assert "NOT_FOUND" in at.run("dlq", "show", "0" * 32, code=ExitCode.USAGE).stderr


def _unique_prefix(one: str, other: str) -> str:
    """The shortest prefix of the first that the other does not start with."""
    return next(one[:length] for length in range(12, 33) if not other.startswith(one[:length]))
