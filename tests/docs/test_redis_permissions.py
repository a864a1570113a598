"""The rules on the page about Redis permissions: complete for what each kind of program does, and not wider.

One test compares them with the commands of the scripts that a kind of program runs. The other runs each kind of program
under its rule on a real Redis, which logs every command and key that it refuses.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import pytest
import redis
from redis.exceptions import NoPermissionError

from holdfast import State
from holdfast.engine.redis.keys import KeyNames, QueueKeys
from holdfast.engine.redis.net.script import Script
from tests.cli.harness import SAMPLE_APP, Shell, environment, eventually
from tests.conftest import MakeServer

PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "redis-permissions.md"
_RULE: Final = re.compile(r"^    ACL SETUSER shop-(\w+) (.*)$", re.MULTILINE)
_CALLED: Final = re.compile(r"p?call\('([A-Z]+)'(?:, '([A-Z]+)')?")
#: Commands whose rules name a subcommand.
_WITH_SUBCOMMAND: Final = ("memory", "xgroup", "xinfo")

CONNECTION: Final = {"evalsha", "script|load", "info", "select", "time"}
LIBRARY: Final = CONNECTION | {
    "subscribe",
    "unsubscribe",
    "smembers",
    "hgetall",
    "xrange",
    "xread",
    "xrevrange",
    "zscan",
}
SUBMISSION: Final = {
    "submit", "create_groups", "register_queue", "get", "move", "attach_reader", "restore_keys", "snapshot",
    "job_names", "restore", "open_gate",
}  # fmt: skip
RUNS: Final = {
    "claim", "adopt", "read_messages", "renew", "settle", "claim_due_retries", "find_due", "find_expired", "reclaim",
    "remove_consumers", "stats", "expire_leases", "keep_worker_id",
}  # fmt: skip
ALL: Final = {
    file.name.removesuffix(".lua")
    for file in (files("holdfast.engine.redis") / "lua").iterdir()
    if not file.name.startswith("_")
}


@dataclass(frozen=True)
class Kind:
    """What one kind of program runs: scripts, and commands that it sends itself."""

    scripts: set[str]
    commands: set[str]
    #: Commands of scripts that this kind of program never reaches.
    unused: frozenset[str] = frozenset()

    def required(self) -> set[str]:
        found = {name for script in self.scripts for name in called_by(script)}
        return (self.commands | found) - self.unused


KINDS: Final = {
    "append": Kind(set(), {"xadd"}),
    "producer": Kind(SUBMISSION, LIBRARY),
    "operator": Kind(
        SUBMISSION | {"set_control", "expedite", "stats", "workers"},
        LIBRARY | {"zrevrange", "xinfo|consumers", "xpending", "config|get"},
    ),
    "worker": Kind(SUBMISSION | RUNS, LIBRARY | {"mget", "xreadgroup", "xpending", "hset", "hdel", "config|get"}),
    "upkeep": Kind(ALL, LIBRARY | {"zrevrange", "mget", "xreadgroup", "hset", "hdel", "xpending", "config|get"}),
    # A look-up registers no waiter.
    "reader": Kind(
        {"stats", "workers", "get", "snapshot"},
        CONNECTION | {"smembers", "sismember", "hgetall", "xrange", "xread", "xrevrange", "zrevrange", "config|get"},
        frozenset({"hset"}),
    ),
}


def called_by(script: str) -> Iterator[str]:
    """The commands of a script, as the rules name them."""
    for name, first in _CALLED.findall(Script(script).source.decode()):
        command = name.lower()
        yield f"{command}|{first.lower()}" if command in _WITH_SUBCOMMAND else command


def rules() -> dict[str, list[str]]:
    return {kind: rule.split() for kind, rule in _RULE.findall(PAGE.read_text(encoding="utf-8"))}


@pytest.mark.parametrize("kind", KINDS)
def test_a_rule_has_the_commands_of_its_programs_and_no_others(kind: str) -> None:
    allowed = {word[1:] for word in rules()[kind] if word.startswith("+")}
    assert allowed == KINDS[kind].required()


def test_each_rule_is_of_a_known_kind() -> None:
    assert set(rules()) == set(KINDS)


class Deployment:
    """A Redis with one user per kind of program, and a shell whose commands run as one of them."""

    def __init__(self, url: str, folder: Path, namespace: str) -> None:
        self.admin: Any = redis.Redis.from_url(url)
        self.keys = QueueKeys("default", KeyNames(namespace=namespace))
        self._address = url.partition("://")[2]
        for kind, words in rules().items():
            rule = [word.replace("shop:", f"{namespace}:") for word in words]
            self.admin.execute_command("ACL", "SETUSER", f"shop-{kind}", *rule)
        (folder / "sample.py").write_text(SAMPLE_APP)
        self.shell = Shell(folder, environment(folder, HOLDFAST_NAMESPACE=namespace))

    def url(self, kind: str) -> str:
        return f"redis://shop-{kind}:password@{self._address}"

    def run(self, kind: str, *words: str) -> str:
        return self.shell.run(*words, HOLDFAST_URL=self.url(kind)).stdout.strip()

    def client(self, kind: str) -> Any:
        return redis.Redis.from_url(self.url(kind), decode_responses=True)

    def refused(self) -> list[tuple[str, str]]:
        """What Redis has refused so far: users, with commands or keys."""
        rows = self.admin.acl_log()
        return [(row["username"], row["object"]) for row in rows]

    def wait_state(self, queue: str, job_id: str, state: State) -> None:
        """Wait until a reader sees the job in this state."""

        def check() -> bool:
            words = ("jobs", "show", job_id, "--queue", queue, "--json")
            shown = self.shell.run(*words, HOLDFAST_URL=self.url("reader"), code=None)
            return shown.returncode == 0 and json.loads(shown.stdout)["state"] == state.value

        eventually(check, what=f"{job_id} to be {state}")


@pytest.fixture
def deployment(make_redis: MakeServer, tmp_path: Path) -> Iterator[Deployment]:
    found = Deployment(make_redis().url, tmp_path, "shop")
    yield found
    found.admin.close()


@pytest.mark.redis
@pytest.mark.postgres
def test_each_kind_of_program_works_under_its_rule(deployment: Deployment, postgres_url: str) -> None:
    """Producers, operators, a worker, upkeep and readers; Redis refuses none of their commands."""
    deployment.shell.environment["HOLDFAST_LEDGER"] = postgres_url
    start, run = deployment.shell.start, deployment.run
    with (
        start("worker", "sample.py:app", "--no-upkeep", HOLDFAST_URL=deployment.url("worker")) as worker,
        start("upkeep", HOLDFAST_URL=deployment.url("upkeep")) as upkeep,
    ):
        app = ("--app", "sample.py:app")
        assert run("producer", "submit", "add", '{"a": 1}', "--durable", "--wait", "60", *app) == "2"
        delayed = run("producer", "submit", "elsewhere", "--queue", "other", "--delay", "1s", *app)
        flaky = run("producer", "submit", "flaky", "--key", "k-1", *app)
        later = run("producer", "submit", "add", '{"a": 1}', "--delay", "1h", *app)
        run("operator", "jobs", "cancel", later, "--reason", "test")
        append = deployment.client("append")
        append.xadd(deployment.keys.streams[1], {"task_id": "j-1", "type": "refuse", "payload": '{"reason":"no"}'})
        append.close()
        deployment.wait_state("other", delayed, State.SUCCEEDED)
        deployment.wait_state("default", flaky, State.SUCCEEDED)
        deployment.wait_state("default", later, State.CANCELLED)
        deployment.wait_state("default", "j-1", State.FAILED)
        run("operator", "queues", "pause", "other", "--reason", "test")
        for words in (["queues", "list"], ["jobs", "list"], ["workers"], ["explain", flaky], ["doctor"]):
            deployment.shell.run(*words, HOLDFAST_URL=deployment.url("reader"), code=None)
        assert (worker.end(), upkeep.end()) == (0, 0)
    assert deployment.refused() == []


@pytest.mark.redis
def test_a_rule_refuses_the_rest(deployment: Deployment) -> None:
    keys = deployment.keys
    stream, direct, control = (key.decode() for key in (keys.streams[1], keys.streams[3], keys.control))
    other = "cart:stream:task"
    for kind, *command in (
        ("append", "HGET", control, "marker"),
        ("append", "XRANGE", stream, "-", "+"),
        ("append", "XADD", direct, "*", "a", "b"),
        ("append", "XADD", other, "*", "a", "b"),
        ("append", "EVAL", "return 1", "0"),
        ("producer", "XACK", other, "cg:workers", "0-1"),
        ("producer", "XCLAIM", stream, "cg:workers", "me", "0", "0-1"),
        ("producer", "FLUSHALL"),
        ("operator", "XTRIM", stream, "MAXLEN", "0"),
        ("operator", "CONFIG", "SET", "maxmemory", "1"),
        ("worker", "ACL", "LIST"),
        ("worker", "KEYS", "*"),
        ("upkeep", "DEL", other),
        ("reader", "HSET", control, "paused", "1"),
        ("reader", "XADD", stream, "*", "a", "b"),
    ):
        client = deployment.client(kind)
        with pytest.raises(NoPermissionError):
            client.execute_command(*command)
        client.close()
