"""`holdfast trigger replay`, from the command line: count, replay, audit entries, and a kill in the middle."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from redis import Redis

from holdfast.cli.command import ExitCode
from tests.cli.harness import Shell, eventually
from tests.cli.test_operations import Desk, desk  # noqa: F401 - a fixture
from tests.cli.test_triggers import counts, streams, write

#: `holdfast …`, except that this process dies when a message is published and its dead letter not acknowledged.
DIES_IN_BETWEEN = """
import os, signal
from holdfast.brokers.redis_streams import RedisAdapter
from holdfast.cli.main import main

ack, calls = RedisAdapter.ack, []

async def killed(self, message):
    calls.append(message)
    if len(calls) == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    await ack(self, message)

RedisAdapter.ack = killed
main()
"""


def bury(redis_url: str, queue: str, *numbers: int) -> None:
    with Redis.from_url(redis_url) as redis:
        for number in numbers:
            dead = {"x-dead-reason": "no", "x-dead-source": queue, "x-dead-message-id": f"m-{number}"}
            redis.xadd(f"{queue}.dlq", {"body": str(number), **dead})


def replayed(redis_url: str, queue: str) -> list[tuple[int, str]]:
    with Redis.from_url(redis_url) as redis:
        entries: Any = redis.xrange(queue)
        return [(int(fields[b"body"]), fields[b"x-replay-of"].decode()) for _, fields in entries]


def pending(redis: Any, queue: str) -> list[Any]:
    rows: list[Any] = redis.xpending_range(f"{queue}.dlq", f"shop.{queue}.replay", "-", "+", 100)
    return rows


def test_replay_counts_asks_and_leaves_audit_entries(desk: Desk, redis_url: str, namespace: str) -> None:  # noqa: F811
    queue = f"{namespace}:orders"
    file = write(desk.folder, streams(redis_url, queue_name=queue, name="orders"))
    bury(redis_url, queue, 1, 2, 3)
    desk.sit("ada")
    words = ("trigger", "replay", file, "orders")
    assert desk.run(*words, "--all", "--dry-run").stdout == "3\twould be changed\n"
    desk.run(*words, "--limit", "2", code=ExitCode.USAGE, stdin="")
    assert replayed(redis_url, queue) == []
    report = desk.json(*words, "--limit", "2", "--yes", "--reason", "the parser is fixed")
    assert (report["done"], [result["id"] for result in report["results"]]) == (2, ["m-1", "m-2"])
    assert desk.run(*words, "--all", stdin="y\n").stdout.splitlines()[1] == "m-3\tdone\t\t"
    assert replayed(redis_url, queue) == [(1, "m-1"), (2, "m-2"), (3, "m-3")]
    lines = [line for line in desk.json("log", "--target", "trigger") if line["type"] == "operator.trigger_replay"]
    assert [(line["actor"], line["target_id"], line["reason"], line["after"]["status"]) for line in lines] == [
        *(("ada", "orders", None, status) for status in ("ended", "started")),
        *(("ada", "orders", "the parser is fixed", status) for status in ("ended", "started")),
    ]
    assert [line["after"].get("done") for line in lines] == [1, None, 2, None]


def test_replay_says_what_is_wrong(desk: Desk, redis_url: str) -> None:  # noqa: F811
    file = write(desk.folder, streams(redis_url))
    assert "pass either --all or --limit N" in desk.run("trigger", "replay", file, "orders", code=ExitCode.USAGE).stderr
    both = desk.run("trigger", "replay", file, "orders", "--all", "--limit", "1", code=ExitCode.USAGE)
    assert "pass either --all or --limit N" in both.stderr
    unknown = desk.run("trigger", "replay", file, "bills", "--all", code=ExitCode.USAGE)
    assert "trigger 'bills' not found" in unknown.stderr
    desk.sit("vic", "viewer")
    assert "FORBIDDEN" in desk.run("trigger", "replay", file, "orders", "--all", "-y", code=ExitCode.REFUSED).stderr


def test_a_replay_that_is_killed_loses_nothing(shell: Shell, redis_url: str, namespace: str) -> None:
    queue = f"{namespace}:orders"
    connection = {"url": redis_url, "visibility_timeout_s": 1}
    file = write(
        shell.folder,
        streams(redis_url, queue_name=queue, name="orders") | {"adapter": {"type": "redis", "connection": connection}},
    )
    bury(redis_url, queue, *range(10))
    words = ("trigger", "replay", file, "orders", "--all", "--yes", "--rate", "1000/s")
    assert counts(shell) == 0
    killed = subprocess.run(
        [sys.executable, "-c", DIES_IN_BETWEEN, *words],
        cwd=shell.folder,
        env=shell.environment,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert killed.returncode == -9, killed.stderr
    some = replayed(redis_url, queue)
    assert 4 <= len(some) <= 10
    with Redis.from_url(redis_url) as redis:
        # What it had in flight is free after the visibility timeout.
        eventually(
            lambda: all(row["time_since_delivered"] > 1_000 for row in pending(redis, queue)), what="the timeout"
        )
        shell.run(*words)
        assert pending(redis, queue) == []
    seen = replayed(redis_url, queue)
    assert len(seen) > len(some)
    assert {number for number, _ in seen} == set(range(10))
    assert all(original == f"m-{number}" for number, original in seen)
