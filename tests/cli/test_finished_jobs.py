"""Finished jobs on the command line: arguments and codes are the same on every pair of stores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.states import State
from tests.cli.deployments import PAIRS, Deployment, deployed
from tests.operations.deployment import SampleDeployment


@pytest.fixture(params=PAIRS)
def at(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Deployment:
    return deployed(request.param, request, tmp_path, monkeypatch)


def document(at: Deployment, *words: str) -> Any:
    return json.loads(at.run(*words, "--json").stdout)


def test_arguments_of_a_finished_job_are_shown(at: Deployment) -> None:
    async def make(world: SampleDeployment) -> tuple[str, str, str]:
        failed = await world.charge.submit(12, currency="hunter2")
        await world.run()
        world.broken = False
        succeeded = await world.charge.submit(11, currency="CHF")
        await world.run()
        assert [await job.state() for job in (failed, succeeded)] == [State.FAILED, State.SUCCEEDED]
        return failed.id, succeeded.id, (await world.charge.options(delay=600).submit(13)).id

    failed, succeeded, delayed = at.do(make)
    for job_id, arguments in (
        (failed, '{"amount":12,"currency":"hunter2"}'),
        (succeeded, '{"amount":11,"currency":"CHF"}'),
        (delayed, '{"amount":13}'),
    ):
        assert document(at, "jobs", "show", job_id)["payload"] == json.loads(arguments)
        shown = at.run("jobs", "show", job_id)
        assert arguments in shown.stdout
        assert shown.stderr == ""
        assert f"to run charge with {arguments}." in at.run("explain", job_id).stdout.replace(", no earlier", ".")


def test_secrets_in_arguments_are_masked_in_the_sentences_of_explain(at: Deployment) -> None:
    async def make(world: SampleDeployment) -> str:
        world.broken = False
        job = await world.app.submit_raw("fetch", b'{"what": "password=hunter2"}')
        await world.run()
        return job.id

    sentences = at.run("explain", at.do(make)).stdout
    assert "to run fetch with" in sentences
    assert "hunter2" not in sentences


@pytest.mark.parametrize("verdict", ["rejected", "expired"])
def test_a_job_that_was_not_approved_has_one_code(at: Deployment, verdict: str) -> None:
    async def make(world: SampleDeployment) -> str:
        job = await world.charge.options(hold=True).submit(10)
        await world.app.engine.move(
            job.queue, job.id, State.CANCELLED, actor="ann", reason="too much", event=f"approval.{verdict}"
        )
        return job.id

    job_id, code = at.do(make), f"APPROVAL_{verdict.upper()}"
    shown = document(at, "jobs", "show", job_id)
    assert (shown["failure"]["code"], shown["failure"]["message"]) == (code, "too much (by ann)")
    (row,) = document(at, "jobs", "list")
    assert row["failure"] == {"code": code, "message": "too much (by ann)"}
    (event,) = [event for event in shown["events"] if event["type"] == f"approval.{verdict}"]
    assert event["data"]["code"] == code
