"""The program on a real Redis: the same commands, and a doctor that knows what a Redis may forget."""

from __future__ import annotations

import json
from typing import Any

import pytest
import redis
from typer.testing import CliRunner, Result

from holdfast.cli.program import program
from holdfast.verification.chaos.servers import RedisServer
from tests.cli.harness import Shell
from tests.conftest import MakeServer

pytestmark = [pytest.mark.redis]

PASSWORD = "hunter2"


@pytest.fixture
def careless(make_redis: MakeServer) -> RedisServer:
    """It keeps nothing on disk, and throws keys away when it is full."""
    return make_redis(appendonly="no", maxmemory="100mb", maxmemory_policy="allkeys-lru")


@pytest.fixture
def careful(make_redis: MakeServer) -> RedisServer:
    """It writes everything down, and wants a password."""
    server = make_redis(appendonly="yes", appendfsync="always")
    with redis.Redis.from_url(server.url) as client:
        client.config_set("requirepass", PASSWORD)
    return server


def secret_url(server: RedisServer) -> str:
    return f"redis://:{PASSWORD}@127.0.0.1:{server.port}/0"


def run(*words: str, code: int = 0) -> Result:
    answer = CliRunner().invoke(program(words[0]), list(words))
    assert answer.exit_code == code, f"exit code {answer.exit_code}\n{answer.output}\n{answer.exception!r}"
    return answer


def findings(url: str, code: int) -> list[dict[str, Any]]:
    report = json.loads(run("doctor", "--url", url, "--json", code=code).stdout)
    assert report["ok"] is (code == 0)
    return list(report["findings"])


def test_doctor_names_a_redis_that_may_forget(careless: RedisServer) -> None:
    bad = [finding for finding in findings(careless.url, 1) if not finding["ok"]]
    said = " ".join(finding["message"] for finding in bad).lower()
    assert "append-only file is off" in said
    assert "allkeys-lru" in said
    assert all(finding["remedy"] for finding in bad)
    shown = run("doctor", "--url", careless.url, code=1).stdout
    assert "DANGER" in shown
    assert "noeviction" in shown


def test_a_worker_warns_of_a_redis_that_may_forget(careless: RedisServer, shell: Shell) -> None:
    at = Shell(shell.folder, shell.environment | {"HOLDFAST_URL": careless.url})
    with at.start("worker", "sample.py:app") as worker:
        worker.wait_log("maxmemory-policy allkeys-lru")
        worker.wait_log("append-only file is off")
        assert worker.end() == 0


def test_a_worker_works_on_a_redis_that_does_not_let_it_ask(careless: RedisServer, shell: Shell) -> None:
    with redis.Redis.from_url(careless.url) as client:
        client.acl_setuser(
            "default", enabled=True, nopass=True, keys=["*"], channels=["*"], commands=["+@all", "-config"]
        )
    at = Shell(shell.folder, shell.environment | {"HOLDFAST_URL": careless.url})
    with at.start("worker", "sample.py:app") as worker:
        worker.wait_log("started")
        assert at.run("submit", "add", "[1]", "--wait", "30").stdout == "2\n"
        assert worker.end() == 0
    assert "CONFIG is hidden" in run("doctor", "--url", careless.url, code=1).stdout


def test_doctor_is_content_with_a_careful_redis(careful: RedisServer) -> None:
    found = findings(secret_url(careful), 0)
    assert {"holdfast", "clock"} <= {finding["check"] for finding in found}
    assert any("7." in finding["message"] for finding in found)
    answer = run("doctor", "--url", secret_url(careful))
    assert PASSWORD not in answer.output


def test_the_same_commands_work_on_redis(careful: RedisServer, shell: Shell) -> None:
    """Submit, work, look, list, cancel; and no log or answer has the password in it."""
    at = Shell(shell.folder, shell.environment | {"HOLDFAST_URL": secret_url(careful)})
    with at.start("worker", "sample.py:app", "--name", "blue") as worker:
        worker.wait_log("started")
        receipt = at.json("submit", "flaky", "--wait", "30")
        assert receipt["result"] == "now"
        assert worker.end() == 0
    job = at.json("jobs", "show", receipt["job_id"])
    assert (job["state"], job["attempt"], job["retry_count"]) == ("succeeded", 2, 1)
    queued = at.run("submit", "add", "[1]", "--delay", "1h").stdout.strip()
    assert queued in {one["job_id"] for one in at.json("jobs", "list", "--state", "queued")}
    at.run("jobs", "cancel", queued)
    at.run("jobs", "cancel", queued, code=4)
    assert at.json("queues", "list", "--queue", "default")[0]["states"]["queued"] == 0
    assert PASSWORD not in worker.log.read_text()
    # The first attempt's failure, and nothing else.
    (warning,) = (line for line in worker.log.read_text().splitlines() if '"level":"warning"' in line)
    assert "(flaky) failed, retry in" in warning
    assert "***" in worker.log.read_text()


def test_namespaces_are_apart(careful: RedisServer) -> None:
    url = secret_url(careful)
    mine = run("submit", "add", "{}", "--url", url, "--namespace", "mine").stdout.strip()
    assert mine in run("jobs", "list", "--url", url, "--namespace", "mine").stdout
    assert run("jobs", "list", "--url", url, "--namespace", "yours").stdout == ""
    run("jobs", "show", mine, "--url", url, code=2)
