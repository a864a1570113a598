"""`holdfast tasks`, and `holdfast submit` without an app: what workers have announced."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.cli.harness import Shell, eventually


@pytest.fixture
def site(shell: Shell, engine_url: str, namespace: str) -> Shell:
    variables = {"HOLDFAST_URL": engine_url, "HOLDFAST_NAMESPACE": namespace}
    return replace(shell, environment=shell.environment | variables)


def test_a_submission_without_an_app_goes_to_the_queue_of_its_task(site: Shell) -> None:
    with site.start("worker", "sample:app", "--no-upkeep") as started:
        started.wait_log(" started on ")
        tasks: list[dict[str, Any]] = eventually(lambda: site.json("tasks", "list"), what="the announcement")
        assert [(each["task"], each["queue"]) for each in tasks] == [
            ("add", "default"),
            ("elsewhere", "other"),
            ("flaky", "default"),
            ("refuse", "default"),
            ("slow", "default"),
        ]
        assert site.run("submit", "elsewhere", "--wait", "60").stdout == '"from the other queue"\n'
        plain = site.run("tasks", "list").stdout.splitlines()
        assert plain[0].split("\t") == ["task", "queue", "arguments", "schema", "last announced"]
        assert plain[1].split("\t")[:3] == ["add", "default", "a, [b]"]
        shown = site.run("tasks", "show", "add").stdout
        assert '"properties"' in shown
        (schema,) = site.json("tasks", "show", "add")["schemas"]
        assert schema["schema"]["required"] == ["a"]
        assert (schema["fingerprint"], schema["queue"]) == (tasks[0]["fingerprint"], "default")
    # After the worker has stopped, too.
    assert site.json("submit", "elsewhere")["queue"] == "other"
    assert site.json("submit", "elsewhere", "--queue", "third")["queue"] == "third"
    for invalid in ('{"a": "one"}', "{}", '{"a": 1, "c": 2}', "[1, 2, 3]", '["one"]'):
        refused = site.run("submit", "add", invalid, code=2)
        assert refused.stderr.startswith("holdfast: INVALID_PAYLOAD: "), refused.stderr
    assert site.json("submit", "add", '{"a": "one"}', "--force")["queue"] == "default"


def test_a_task_that_no_worker_announced_is_refused(site: Shell) -> None:
    site.run("submit", "add", '{"a": 1}', "--force")
    refused = site.run("submit", "add", '{"a": 1}', code=2)
    assert refused.stderr.startswith("holdfast: TASK_NOT_ANNOUNCED: no worker has announced a task named 'add'")
    assert "--force" in refused.stderr
    assert site.run("tasks", "list").stdout == ""
    assert site.run("tasks", "show", "add", code=2).stderr.startswith("holdfast: TASK_NOT_ANNOUNCED: ")
    # With an app nothing changes.
    assert site.json("submit", "elsewhere", "--app", "sample.py")["queue"] == "other"
