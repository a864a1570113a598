"""`holdfast explain` prints the same text for the same history on every pair of stores."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.cli.deployments import PAIRS, Deployment, deployed
from tests.cli.job_histories import HISTORIES, Histories
from tests.operations.deployment import SampleDeployment

#: What differs between two runs of the same history.
_VOLATILE: Final = (
    (re.compile(r"\b[0-9a-f]{32}\b"), "<id>"),
    (re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC"), "<instant>"),
    (re.compile(r"\b\d+(\.\d+)? (ms|s|min|h|d)\b( \d+ (s|min|h))?"), "<span>"),
    (re.compile(rf"{re.escape(socket.gethostname())}-{os.getpid()}-[0-9a-f]{{16}}"), "<worker>"),
)

Sentences = dict[str, list[str]]


def explained(at: Deployment) -> Sentences:
    async def make(world: SampleDeployment) -> dict[str, str]:
        return await Histories(world.app).make_all()

    with pytest.MonkeyPatch.context() as patch:
        # How often a job of an unknown task is released depends on timing, and the sentences must not.
        patch.setenv("HOLDFAST_UNKNOWN_TASK_GRACE_S", "0")
        ids = at.do(make)
    return {
        name: [_normalise(line) for line in at.run("explain", job_id).stdout.splitlines()]
        for name, job_id in ids.items()
    }


def _normalise(line: str) -> str:
    for pattern, word in _VOLATILE:
        line = pattern.sub(word, line)
    return line


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sentences]:
    """The text for an embedded ledger."""
    folder = tmp_path_factory.mktemp("embedded")
    with pytest.MonkeyPatch.context() as patch:
        yield explained(Deployment(f"sqlite:///{folder}/jobs.db", None, "", patch))


@pytest.mark.parametrize("pair", PAIRS[1:])
def test_the_same_sentences_on_all_stores(
    embedded: Sentences,
    pair: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sentences = explained(deployed(pair, request, tmp_path, monkeypatch))
    assert sentences.keys() == HISTORIES.keys()
    assert sentences == embedded


def test_a_queue_that_is_paused_or_unserved_is_named(embedded: Sentences) -> None:
    assert embedded["paused"][-2:] == [
        "Its queue is paused.",
        "It runs after the queue is resumed: `holdfast queues resume paused`.",
    ]
    assert embedded["retrying-and-paused"][-3:] == [
        "Its queue is paused.",
        "Then it runs again, as attempt 2.",
        "It runs after the queue is resumed: `holdfast queues resume retrying-and-paused`.",
    ]
    assert embedded["idle"][-2:] == [
        "No worker serves its queue.",
        "It runs once a worker does: `holdfast worker APP --queue idle`.",
    ]
    assert not [line for lines in embedded.values() for line in lines if "is one running" in line]


def test_a_principal_of_one_tenant_is_shown_the_pause_but_not_the_workers(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = deployed("embedded", request, tmp_path, monkeypatch)
    job_id = at.run("submit", "--force", "add", "[1]", "--tenant", "acme").stdout.strip()
    assert "No worker serves its queue." in at.run("explain", job_id).stdout
    at.run("queues", "pause", "default")
    at.act_as("olga", "viewer", "acme")
    assert "Its queue is paused." in at.run("explain", job_id).stdout
    monkeypatch.delenv("HOLDFAST_TOKEN")
    at.run("queues", "resume", "default")
    at.act_as("olga", "viewer", "acme")
    assert at.run("explain", job_id).stdout.splitlines()[-1] == "The next free worker of its queue claims it."


def test_a_job_that_waits_for_the_queues_limit_says_so(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = deployed("embedded", request, tmp_path, monkeypatch)
    first, second = (at.run("submit", "--force", "add", "[1]").stdout.strip() for _ in range(2))
    at.run("queues", "concurrency", "default", "1")

    async def claim(world: SampleDeployment) -> None:
        (claim,) = await world.app.engine.claim("w1", ["default"], 5, 0)
        assert claim.job_id == first

    at.do(claim)
    lines = at.run("explain", second).stdout.splitlines()
    assert "Its queue is at its concurrency limit: 1 of 1 jobs are running." in lines
    assert "concurrency 1 (reached)" in at.run("queues", "list").stdout
