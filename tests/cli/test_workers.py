"""`holdfast workers`: live workers of every store, one row each."""

from __future__ import annotations

import os
import signal
import socket
from dataclasses import replace
from typing import Any

import pytest

from holdfast.identity import new_identity, parse_identity
from tests.cli.harness import Shell, eventually


def list_workers(shell: Shell, *words: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = shell.json("workers", *words)
    return found


def test_workers_are_listed_once_with_all_of_their_queues(shell: Shell, engine_url: str, namespace: str) -> None:
    variables = {"HOLDFAST_URL": engine_url, "HOLDFAST_NAMESPACE": namespace}
    shell = replace(shell, environment=shell.environment | variables)
    job = shell.run("submit", "--force", "slow", '{"seconds": 600}').stdout.strip()
    with shell.start("worker", "sample:app", "--name", "blue", "--no-upkeep") as started:
        shell.run("submit", "--force", "elsewhere", "--queue", "other", "--wait", "60")
        shell.wait_begun(job)
        (found,) = list_workers(shell)
        process = started.process
        assert parse_identity(found["worker"]) is not None
        assert (found["name"], found["host"], found["pid"]) == ("blue", socket.gethostname(), process.pid)
        assert (found["queues"], found["in_flight"]) == (["default", "other"], 1)
        assert found["started_at"] <= found["seen_at"]
        assert list_workers(shell, "--queue", "nothing") == []
        plain = shell.run("workers").stdout
        header, row = plain.splitlines()
        assert header.split("\t") == ["worker", "host", "pid", "in flight", "running for", "last seen", "queues"]
        assert row.startswith(f"{found['worker']}\t{socket.gethostname()}\t{process.pid}\t1\t")
        shell.run("jobs", "cancel", job)
        process.send_signal(signal.SIGTERM)
        process.wait()
    assert list_workers(shell) == []


def test_a_worker_on_a_new_store_is_listed(shell: Shell) -> None:
    """Even before the first job."""
    with shell.start("worker", "sample:app") as started:
        started.wait_log(" started on ")
        eventually(lambda: list_workers(shell), what="the worker")


def test_without_workers_a_note_is_printed(shell: Shell) -> None:
    shell.run("submit", "--force", "add", '{"a": 1}')
    done = shell.run("workers")
    assert done.stdout == ""
    assert "no worker claims jobs here" in done.stderr


@pytest.mark.parametrize("name", ["", "blue", "eu-west@blue-1"])
def test_an_identity_says_which_process_it_is(name: str) -> None:
    one, two = new_identity(name), new_identity(name)
    assert one != two
    identity = parse_identity(one)
    assert identity is not None
    assert (identity.name, identity.host, identity.pid) == (name, socket.gethostname(), os.getpid())


@pytest.mark.parametrize(
    "foreign", ["", "-", "consumer-1", "vm-12-abcdef", "vm-x-0123456789abcdef", "-1-0123456789abcdef"]
)
def test_a_name_of_another_program_is_only_a_name(foreign: str) -> None:
    assert parse_identity(foreign) is None
