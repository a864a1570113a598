"""`holdfast trigger`, from the command line: check, run on Redis Streams, status, pause, plan."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import yaml
from redis import Redis

from holdfast import Holdfast
from holdfast.cli.command import ExitCode
from holdfast.cli.session import local_principal
from holdfast.execution.backend import backend_of
from holdfast.ledger.port.messages import Execution, ExecutionStatus, TriggerHeartbeat
from holdfast.operations.operations import Operations
from tests.cli.harness import Process, Shell, eventually
from tests.cli.test_operations import OperatorCli, cli  # noqa: F401 - a fixture

SECRET = "hunter2-is-not-here"
ONE: dict[str, Any] = {
    "queue_name": "orders",
    "consumer_group": "shop",
    "adapter": {"type": "memory"},
    "runtime": {"task": "add"},
}


def write(folder: Path, *triggers: dict[str, Any], name: str = "triggers.yaml") -> str:
    (folder / name).write_text(yaml.safe_dump({"triggers": list(triggers)}))
    return name


def record_trigger(cli: OperatorCli, name: str = "orders", *, age_ms: int = 0) -> None:  # noqa: F811
    """Record a heartbeat of a trigger, and one execution."""

    async def report() -> None:
        async with Holdfast(f"sqlite:///{cli.folder}/jobs.db") as app:
            backend = backend_of(app)
            assert backend.ledger is not None
            now_ms = await app.engine.now_ms()
            health = {"status": "healthy", "running": True, "active_workers": 3, "paused": False}
            heartbeat = TriggerHeartbeat(
                name=name, process="host-1", queue_name="orders", adapter="kafka", health=health, seen_at_ms=now_ms
            )
            await backend.ledger.triggers.heartbeat([heartbeat], expire_after_ms=60_000)
            row = Execution(
                tenant_id="acme",
                id="1",
                message_id="orders/0/17",
                queue_name="orders",
                event_name="order.placed",
                status=ExecutionStatus.FAILED,
                started_at_ms=now_ms - 1500,
                completed_at_ms=now_ms,
                error_message="ValueError: no such order",
                retry_count=3,
            )
            await backend.ledger.triggers.record_executions([row])

    asyncio.run(report())


# check ---------------------------------------------------------------------------------------------


def test_check_lists_the_triggers(cli: OperatorCli) -> None:  # noqa: F811
    file = write(cli.folder, ONE, ONE | {"name": "b", "runtime": {"url": "http://127.0.0.1:1/run"}, "concurrency": 4})
    answer = cli.run("trigger", "check", file)
    assert answer.stdout.splitlines() == [
        "trigger\tbroker\tqueue\tgroup\tconcurrency\tpolicy\tto",
        "orders\tmemory\torders\tshop\t1\tack\tadd",
        "b\tmemory\torders\tshop\t4\tack\thttp://127.0.0.1:1/run",
    ]
    assert "no errors" in answer.stderr
    first, _ = cli.json("trigger", "check", file)
    assert (first["name"], first["runtime"], first["adapter"]) == ("orders", {"task": "add"}, {"type": "memory"})
    assert not (cli.folder / "jobs.db").exists()


def test_check_reports_all_mistakes_and_no_secret(cli: OperatorCli) -> None:  # noqa: F811
    wrong = ONE | {"concurency": 2, "runtime": {"url": "http://127.0.0.1", "token": SECRET}}
    answer = cli.run("trigger", "check", write(cli.folder, wrong, ONE | {"ack_policy": "x"}), code=ExitCode.USAGE)
    assert answer.stdout == ""
    assert answer.stderr.splitlines() == [
        "triggers.yaml: triggers[0].runtime.token: must not be in a file; write ${NAME} and set the variable NAME",
        "triggers.yaml: triggers[0].concurency: unknown key; did you mean concurrency?",
        "triggers.yaml: triggers[1].ack_policy: Input should be 'ack', 'nack', 'requeue' or 'dlq'",
        "holdfast: INVALID_OPTION: triggers.yaml has errors; fix those listed above",
    ]
    one = cli.run("trigger", "check", "missing.yaml", code=ExitCode.USAGE)
    assert one.stderr.startswith("missing.yaml: file not found in ")


def test_check_verifies_tasks_and_brokers(cli: OperatorCli) -> None:  # noqa: F811
    (cli.folder / "shop_of_check.py").write_text(
        "from holdfast import Holdfast\napp = Holdfast()\n@app.task\ndef add(a: int) -> int: return a\n"
    )
    unreachable = {"type": "redis", "connection": {"url": "redis://127.0.0.1:1/0"}}
    file = write(
        cli.folder,
        ONE,
        ONE | {"name": "b", "runtime": {"task": "nothing"}},
        ONE | {"name": "c", "adapter": unreachable},
    )
    cli.run("trigger", "check", file)
    answer = cli.run("trigger", "check", file, "shop_of_check.py:app", "--connect", code=ExitCode.USAGE)
    assert "trigger b: no task named 'nothing'" in answer.stderr
    assert "trigger c: " in answer.stderr
    file = write(cli.folder, ONE, ONE | {"name": "c", "adapter": unreachable})
    assert "trigger c: " in cli.run("trigger", "check", file, "--connect", code=ExitCode.UNAVAILABLE).stderr
    assert "brokers answer" in cli.run("trigger", "check", write(cli.folder, ONE), "--connect").stderr


# status, executions, pause, resume -----------------------------------------------------------------


def test_status_pause_and_resume(cli: OperatorCli) -> None:  # noqa: F811
    record_trigger(cli)
    cli.act_as("ada")
    rows = cli.run("trigger", "status").stdout.splitlines()
    assert rows[1] == "orders\thealthy\tkafka\torders\t1\t3\t–\t"
    cli.run("trigger", "pause", "orders", "--reason", "the warehouse moves")
    (paused,) = cli.json("trigger", "status")
    assert (paused["status"], paused["paused_by"], paused["pause_reason"]) == ("paused", "ada", "the warehouse moves")
    assert paused["processes"][0]["process"] == "host-1"
    (resumed,) = cli.json("trigger", "resume", "orders")
    assert (resumed["status"], resumed["paused"]) == ("healthy", False)
    entries = cli.json("log", "--target", "trigger")
    assert [(entry["type"], entry["actor"]) for entry in entries] == [
        ("operator.trigger_resume", "ada"),
        ("operator.trigger_pause", "ada"),
    ]


def test_permissions_and_unknown_triggers(cli: OperatorCli) -> None:  # noqa: F811
    record_trigger(cli)
    cli.act_as("vic", "viewer")
    assert "orders" in cli.run("trigger", "status").stdout
    cli.run("trigger", "pause", "orders", code=ExitCode.REFUSED)
    cli.act_as("olga", "operator", "acme")
    cli.run("trigger", "pause", "orders", code=ExitCode.REFUSED)
    cli.run("trigger", "status", code=ExitCode.REFUSED)
    assert "order.placed" in cli.run("trigger", "executions").stdout
    cli.act_as("gil", "operator", "globex")
    assert cli.json("trigger", "executions") == []
    cli.act_as(None)
    assert "trigger 'unknown' not found" in cli.run("trigger", "pause", "unknown", code=ExitCode.USAGE).stderr
    assert cli.json("trigger", "pause", "orders")[0]["paused_by"].startswith("local:")


def test_executions_are_listed(cli: OperatorCli) -> None:  # noqa: F811
    record_trigger(cli)
    (row,) = cli.json("trigger", "executions", "--queue", "orders", "--message", "orders/0/17")
    assert (row["status"], row["duration_ms"], row["retry_count"]) == ("failed", 1500, 3)
    line = cli.run("trigger", "executions").stdout.splitlines()[1].split("\t")
    assert line[1:] == [
        *("orders", "orders/0/17", "order.placed", "acme", "failed", "1.5 s", "3", "–", "ValueError: no such order")
    ]
    assert cli.json("trigger", "executions", "--queue", "other") == []
    assert cli.json("trigger", "executions", "--status", "failed") == [row]
    assert cli.json("trigger", "executions", "--status", "failed", "--status", "rejected") == [row]
    assert cli.json("trigger", "executions", "-s", "success") == []
    assert "'broken' is not one of" in cli.run("trigger", "executions", "-s", "broken", code=ExitCode.USAGE).stderr


def test_without_a_ledger_status_is_refused(cli: OperatorCli, redis_url: str) -> None:  # noqa: F811
    answer = cli.run("trigger", "status", "--url", redis_url, code=ExitCode.USAGE)
    assert "NO_LEDGER" in answer.stderr


# plan ----------------------------------------------------------------------------------------------


def test_plan_computes_concurrency_and_memory(cli: OperatorCli) -> None:  # noqa: F811
    words = ("trigger", "plan", "--rate", "8.33", "--seconds-per-message", "2", "--message-bytes", "1048576")
    assert cli.json(*words, "--cores", "8", "--waiting") == {
        "concurrency": 17,
        "required": 17,
        "enough": True,
        "rate": 8.5,
        "memory_mb": 2775.0,
        "processes": 1,
    }
    answer = cli.run(*words, "--cores", "2")
    assert answer.stdout.splitlines() == [
        "concurrency  4",
        "memory       825 MB",
        "processes    5, each on a separate machine",
    ]
    assert "--waiting" in answer.stderr
    wrong = ("trigger", "plan", "--rate", "0", "--seconds-per-message", "2", "--message-bytes", "1")
    cli.run(*wrong, code=ExitCode.USAGE)


# run -----------------------------------------------------------------------------------------------


def streams(redis_url: str, **more: Any) -> dict[str, Any]:
    return ONE | {"adapter": {"type": "redis", "connection": {"url": redis_url}}} | more


def port_of(process: Process) -> int:
    process.wait_log("metrics on http")
    found = re.search(r"metrics on http://127\.0\.0\.1:(\d+)/metrics", process.log.read_text())
    assert found is not None
    return int(found[1])


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as exc:
        return exc.code, exc.read().decode()


def count_jobs(shell: Shell) -> int:
    async def count() -> int:
        async with Holdfast(shell.environment["HOLDFAST_URL"]) as app:
            return sum((await app.engine.stats("default")).states.values())

    return asyncio.run(count())


def call_operation(shell: Shell, what: str, *words: Any, **more: Any) -> Any:
    """Call an operation on triggers in this process, which is quicker than the program."""

    async def call() -> Any:
        async with Holdfast(shell.environment["HOLDFAST_URL"]) as app:
            return await getattr(Operations.for_app(app).triggers, what)(local_principal(), *words, **more)

    return asyncio.run(call())


def test_run_on_redis_streams(shell: Shell, redis_url: str, namespace: str) -> None:
    queue = f"{namespace}:orders"
    file = write(shell.folder, streams("${BROKER}", queue_name=queue, name="orders"))
    with (
        Redis.from_url(redis_url) as redis,
        shell.start("trigger", "run", file, "sample.py:app", "--metrics-port", "0", BROKER=redis_url) as process,
    ):
        port = port_of(process)
        process.wait_log("trigger orders started")
        for number in (1, 2, 2):
            redis.xadd(queue, {"body": json.dumps({"a": number}), "x-dedup-key": str(number)})
        eventually(lambda: 'status="duplicate"} 1.0' in get(port, "/metrics")[1], what="the third message")
        assert f'queue_messages_consumed_total{{queue="{queue}",status="success"}} 2.0' in get(port, "/metrics")[1]
        assert count_jobs(shell) == 2
        assert get(port, "/readyz") == (200, '{"ready":true,"failing":[]}')
        (trigger,) = eventually(lambda: call_operation(shell, "list"), what="its heartbeat")
        assert (trigger.name, trigger.status, trigger.adapter) == ("orders", "healthy", "redis")
        call_operation(shell, "pause", "orders", reason="test")
        process.wait_log("trigger orders paused by an operator")
        redis.xadd(queue, {"body": json.dumps({"a": 3}), "x-dedup-key": "3"})
        call_operation(shell, "resume", "orders", reason="test")
        eventually(lambda: count_jobs(shell) == 3, what="the fourth message")
        assert process.end() == 0
        assert process.logged("triggers ended")
        assert redis.xpending(queue, "shop")["pending"] == 0
    assert call_operation(shell, "list") == []


def test_run_without_a_ledger_logs_a_warning(shell: Shell, redis_url: str, namespace: str) -> None:
    words = ("--url", redis_url, "--namespace", namespace)
    with shell.start("trigger", "run", write(shell.folder, ONE), "sample.py:app", *words) as process:
        process.wait_log("trigger orders started")
        assert process.logged("no ledger: triggers run")
        assert process.end() == 0


def test_run_reports_all_unreachable_brokers_at_once(shell: Shell) -> None:
    unreachable = streams("redis://127.0.0.1:1/0")
    file = write(shell.folder, ONE, unreachable | {"name": "a"}, unreachable | {"name": "b"})
    answer = shell.run("trigger", "run", file, "sample.py:app", code=ExitCode.UNAVAILABLE)
    last = answer.stderr.splitlines()[-1]
    assert last.startswith("holdfast: BROKER_UNAVAILABLE: trigger a: ")
    assert "; trigger b: " in last


def test_run_with_wrong_credentials_shows_none_of_them(shell: Shell, redis_url: str) -> None:
    wrong = streams(redis_url) | {
        "adapter": {
            "type": "redis",
            "connection": {"url": redis_url, "username": "ada", "password": "${BROKER_PASSWORD}"},
        }
    }
    answer = shell.run(
        "trigger",
        "run",
        write(shell.folder, wrong),
        "sample.py:app",
        "--log-level",
        "debug",
        code=ExitCode.UNAVAILABLE,
        BROKER_PASSWORD=SECRET,
    )
    assert "BROKER_REFUSED" in answer.stderr
    assert SECRET not in answer.stderr + answer.stdout


SLOW = """
import time
def handle(event_name, context, focus, tenant_id):
    open("begun", "w").close()
    time.sleep(60)
"""


def test_a_second_signal_stops_now(shell: Shell, redis_url: str, namespace: str) -> None:
    (shell.folder / "slow_handler.py").write_text(SLOW)
    queue = f"{namespace}:slow"
    file = write(shell.folder, streams(redis_url, queue_name=queue, runtime={"callable": "slow_handler.py:handle"}))
    with Redis.from_url(redis_url) as redis, shell.start("trigger", "run", file) as process:
        redis.xadd(queue, {"body": "1"})
        eventually(lambda: (shell.folder / "begun").exists(), what="the call")
        os.kill(process.process.pid, signal.SIGTERM)
        process.wait_log("1 messages in flight")
        assert process.process.poll() is None
        assert redis.xpending(queue, "shop")["pending"] == 1
        os.kill(process.process.pid, signal.SIGTERM)
        assert process.process.wait(60) == 0
        assert process.logged("with 1 unfinished messages")
