"""The program on a real Redis: the same commands, and a doctor that finds settings that may lose data."""

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
def volatile_redis(make_redis: MakeServer) -> RedisServer:
    """A Redis without persistence, which evicts keys when it is full."""
    return make_redis(appendonly="no", maxmemory="100mb", maxmemory_policy="allkeys-lru")


@pytest.fixture
def persistent_redis(make_redis: MakeServer) -> RedisServer:
    """A Redis that persists every write and needs a password."""
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


def test_doctor_reports_a_redis_that_may_lose_data(volatile_redis: RedisServer) -> None:
    bad = [finding for finding in findings(volatile_redis.url, 1) if not finding["ok"]]
    messages = " ".join(finding["message"] for finding in bad).lower()
    assert "append-only file is off" in messages
    assert "allkeys-lru" in messages
    assert all(finding["remedy"] for finding in bad)
    shown = run("doctor", "--url", volatile_redis.url, code=1).stdout
    assert "DANGER" in shown
    assert "noeviction" in shown


def test_a_worker_warns_of_a_redis_that_may_lose_data(volatile_redis: RedisServer, shell: Shell) -> None:
    redis_shell = Shell(shell.folder, shell.environment | {"HOLDFAST_URL": volatile_redis.url})
    with redis_shell.start("worker", "sample.py:app") as worker:
        worker.wait_log("maxmemory-policy allkeys-lru")
        worker.wait_log("append-only file is off")
        assert worker.end() == 0


def test_a_worker_runs_on_a_redis_that_hides_its_configuration(volatile_redis: RedisServer, shell: Shell) -> None:
    with redis.Redis.from_url(volatile_redis.url) as client:
        client.acl_setuser(
            "default", enabled=True, nopass=True, keys=["*"], channels=["*"], commands=["+@all", "-config"]
        )
    redis_shell = Shell(shell.folder, shell.environment | {"HOLDFAST_URL": volatile_redis.url})
    with redis_shell.start("worker", "sample.py:app") as worker:
        worker.wait_log("started")
        assert redis_shell.run("submit", "--force", "add", "[1]", "--wait", "30").stdout == "2\n"
        assert worker.end() == 0
    assert "CONFIG is hidden" in run("doctor", "--url", volatile_redis.url, code=1).stdout


def test_doctor_accepts_a_persistent_redis(persistent_redis: RedisServer) -> None:
    found = findings(secret_url(persistent_redis), 0)
    assert {"holdfast", "clock"} <= {finding["check"] for finding in found}
    assert any("7." in finding["message"] for finding in found)
    answer = run("doctor", "--url", secret_url(persistent_redis))
    assert PASSWORD not in answer.output


def test_the_same_commands_work_on_redis(persistent_redis: RedisServer, shell: Shell) -> None:
    """Submit, work, show, list and cancel; the password is not in the log."""
    redis_shell = Shell(shell.folder, shell.environment | {"HOLDFAST_URL": secret_url(persistent_redis)})
    with redis_shell.start("worker", "sample.py:app", "--name", "blue") as worker:
        worker.wait_log("started")
        receipt = redis_shell.json("submit", "--force", "flaky", "--wait", "30")
        assert receipt["result"] == "now"
        assert worker.end() == 0
    job = redis_shell.json("jobs", "show", receipt["job_id"])
    assert (job["state"], job["attempt"], job["retry_count"]) == ("succeeded", 2, 1)
    queued = redis_shell.run("submit", "--force", "add", "[1]", "--delay", "1h").stdout.strip()
    assert queued in {one["job_id"] for one in redis_shell.json("jobs", "list", "--state", "queued")}
    redis_shell.run("jobs", "cancel", queued)
    redis_shell.run("jobs", "cancel", queued, code=4)
    assert redis_shell.json("queues", "list", "--queue", "default")[0]["states"]["queued"] == 0
    assert PASSWORD not in worker.log.read_text()
    # The first attempt's failure, and nothing else.
    (warning,) = (line for line in worker.log.read_text().splitlines() if '"level":"warning"' in line)
    assert "(flaky) failed, retry in" in warning
    assert "***" in worker.log.read_text()


def test_namespaces_are_separate(persistent_redis: RedisServer) -> None:
    url = secret_url(persistent_redis)
    job_id = run("submit", "--force", "add", "{}", "--url", url, "--namespace", "mine").stdout.strip()
    assert job_id in run("jobs", "list", "--url", url, "--namespace", "mine").stdout
    assert run("jobs", "list", "--url", url, "--namespace", "yours").stdout == ""
    run("jobs", "show", job_id, "--url", url, code=2)
