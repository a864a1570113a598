"""Every command against a real SQLite file: its output as JSON and as text, and its exit code."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from holdfast.cli.command import ExitCode
from holdfast.cli.program import program
from tests.cli.harness import SAMPLE_APP

JOB_ID = re.compile(r"[0-9a-f]{32}")


class InProcess:
    """The program in this process: quick, for commands that need no app."""

    def __init__(self) -> None:
        self._runner = CliRunner()

    def run(self, *words: str, code: int = 0, stdin: str | None = None) -> Result:
        answer = self._runner.invoke(program(words[0]), list(words), input=stdin)
        assert answer.exit_code == code, f"exit code {answer.exit_code}\n{answer.output}\n{answer.exception!r}"
        return answer

    def json(self, *words: str, code: int = 0) -> Any:
        return json.loads(self.run(*words, "--json", code=code).stdout)

    def submit(self, *words: str) -> str:
        return self.run("submit", "--force", *words).stdout.strip()


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> InProcess:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOLDFAST_URL", f"sqlite:///{tmp_path}/jobs.db")
    return InProcess()


# submit --------------------------------------------------------------------------------------------


def test_submit_prints_the_id_and_nothing_else(cli: InProcess) -> None:
    answer = cli.run("submit", "--force", "add", '{"a": 1}')
    assert JOB_ID.fullmatch(answer.stdout.strip())
    assert answer.stderr == ""


def test_submit_takes_all_options(cli: InProcess) -> None:
    words = ("--queue", "mail", "--key", "k-1", "--delay", "1h", "--priority", "low", "--tenant", "acme")
    receipt = cli.json("submit", "--force", "add", "--arg", "a=1", "--arg", "b=two", *words)
    job = cli.json("jobs", "show", receipt["job_id"])
    assert job["payload"] == {"a": 1, "b": "two"}
    assert (job["queue"], job["tenant_id"], job["priority"], job["idempotency_key"]) == ("mail", "acme", "low", "k-1")
    assert job["state"] == "queued"
    assert job["next_attempt_at"] > job["created_at"]


def test_submit_at_an_instant(cli: InProcess) -> None:
    job_id = cli.submit("add", "[1]", "--run-at", "2100-01-31T08:00:00+02:00")
    job = cli.json("jobs", "show", job_id)
    assert job["next_attempt_at"] == "2100-01-31T06:00:00.000Z"
    assert job["payload"] == [1]


def test_a_second_submission_with_the_key_is_the_first_job(cli: InProcess) -> None:
    first = cli.json("submit", "--force", "add", "{}", "--key", "k")
    second = cli.json("submit", "--force", "add", "{}", "--key", "k")
    assert (first["duplicate"], second["duplicate"]) == (False, True)
    assert first["job_id"] == second["job_id"]


def test_a_key_of_another_request_is_refused_unless_the_first_job_is_wanted(cli: InProcess) -> None:
    first = cli.json("submit", "--force", "add", '{"a": 1}', "--key", "k")["job_id"]
    refused = cli.run("submit", "--force", "add", '{"a": 2}', "--key", "k", code=ExitCode.USAGE)
    assert "IDEMPOTENCY_KEY_REUSED" in refused.stderr
    assert first in refused.stderr
    again = cli.json("submit", "--force", "add", '{"a": 2}', "--key", "k", "--on-key-reuse", "return")
    assert (again["job_id"], again["duplicate"]) == (first, True)


def test_arguments_from_stdin(cli: InProcess) -> None:
    job_id = cli.run("submit", "--force", "add", "-", stdin='{"a": "ü"}').stdout.strip()
    assert cli.json("jobs", "show", job_id)["payload"] == {"a": "ü"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["add", "{"], "INVALID_PAYLOAD"),
        (["add", "7"], "INVALID_PAYLOAD"),
        (["add", "{}", "--arg", "a=1"], "INVALID_PAYLOAD"),
        (["add", "--delay", "-3"], "INVALID_OPTION"),
        (["add", "--delay", "soon"], "INVALID_OPTION"),
        (["add", "--run-at", "2030-01-01"], "INVALID_OPTION"),
        (["add", "--delay", "1", "--run-at", "2030-01-01T00:00:00Z"], "INVALID_OPTION"),
        (["add", "--app", "nowhere.py"], "cannot load app"),
    ],
)
def test_a_wrong_submission_is_exit_code_2(cli: InProcess, words: list[str], message: str) -> None:
    answer = cli.run("submit", "--force", *words, code=2)
    assert message in answer.stderr
    assert answer.stdout == ""
    assert len(answer.stderr.splitlines()) == 1


def test_waiting_too_long_is_exit_code_5(cli: InProcess) -> None:
    answer = cli.run("submit", "--force", "add", "[1]", "--wait", "0.1", code=5)
    assert "WAIT_TIMEOUT" in answer.stderr
    assert answer.stdout == ""


# jobs ----------------------------------------------------------------------------------------------


def test_list_filters_by_queue_state_and_limit(cli: InProcess) -> None:
    default = [cli.submit("add", "{}") for _ in range(3)]
    other = cli.submit("add", "{}", "--queue", "other")
    cli.run("jobs", "cancel", default[0])
    assert {job["job_id"] for job in cli.json("jobs", "list")} == {*default, other}
    assert {job["job_id"] for job in cli.json("jobs", "list", "-s", "queued", "-q", "default")} == set(default[1:])
    assert [job["job_id"] for job in cli.json("jobs", "list", "-s", "cancelled")] == default[:1]
    assert len(cli.json("jobs", "list", "--limit", "2")) == 2


def test_list_in_a_pipe_is_tab_separated(cli: InProcess) -> None:
    job_id = cli.submit("add", "{}")
    header, line = cli.run("jobs", "list").stdout.splitlines()
    assert header.split("\t")[:4] == ["job", "task", "queue", "state"]
    assert line.split("\t")[:4] == [job_id, "add", "default", "queued"]


def test_an_empty_list_is_not_an_error(cli: InProcess) -> None:
    cli.submit("add", "{}")
    assert cli.json("jobs", "list", "--state", "failed") == []
    answer = cli.run("jobs", "list", "--state", "failed")
    assert (answer.stdout, answer.stderr) == ("", "no jobs\n")


def test_show_prints_the_history(cli: InProcess) -> None:
    job_id = cli.submit("add", '{"a": 1}', "--delay", "1h")
    shown = cli.run("jobs", "show", job_id).stdout
    assert job_id in shown
    assert '{"a": 1}' in shown
    assert re.search(r"created\ttask add, queue default", shown)
    assert re.search(r"\+1\.0 h\twaiting until\tqueued", shown)


def test_an_unknown_job_is_exit_code_2(cli: InProcess) -> None:
    cli.submit("add", "{}")
    for words in (["jobs", "show", "nope"], ["jobs", "show", "nope", "-q", "default"], ["jobs", "cancel", "nope"]):
        answer = cli.run(*words, code=2)
        assert answer.stderr.startswith("holdfast: UNKNOWN_JOB: ")


def test_cancel_prints_the_move_and_refuses_a_second_one(cli: InProcess) -> None:
    job_id = cli.submit("add", "{}")
    done = cli.json("jobs", "cancel", job_id, "--reason", "no need")
    assert done == [{"job_id": job_id, "queue": "default", "from": "queued", "to": "cancelled"}]
    answer = cli.run("jobs", "cancel", job_id, code=4)
    assert answer.stderr.startswith("holdfast: WF_STATE_TRANSITION_INVALID: ")
    assert len(answer.stderr.splitlines()) == 1
    assert "Traceback" in cli.run("jobs", "cancel", job_id, "--debug", code=4).stderr


def test_cancel_many_prints_one_line_each(cli: InProcess) -> None:
    ids = [cli.submit("add", "{}") for _ in range(2)]
    lines = cli.run("jobs", "cancel", *ids).stdout.splitlines()
    assert lines == [f"{job_id}\tqueued → cancelled" for job_id in ids]


def test_watch_until_empty_ends_by_itself(cli: InProcess) -> None:
    job_id = cli.submit("add", "{}")
    timed_out = cli.run("jobs", "watch", "--until-empty", "--timeout", "0.2", "--interval", "0.05", "--json", code=5)
    snapshots = [json.loads(line) for line in timed_out.stdout.splitlines()]
    assert len(snapshots) > 1
    assert snapshots[0]["queues"][0]["queue"] == "default"
    assert snapshots[0]["queues"][0]["states"]["queued"] == 1
    assert set(snapshots[0]["queues"][0]["per_second"]) == {"created", "succeeded", "retried", "failed", "cancelled"}
    cli.run("jobs", "cancel", job_id)
    assert "queue=default queued=0" in cli.run("jobs", "watch", "--until-empty").stdout


# queues --------------------------------------------------------------------------------------------


def test_queues_list(cli: InProcess) -> None:
    cli.submit("add", "{}")
    cli.submit("add", "{}", "--queue", "mail", "--delay", "60")
    default, mail = cli.json("queues", "list")
    assert (default["queue"], default["states"]["queued"], default["delayed"]) == ("default", 1, 0)
    assert (mail["queue"], mail["states"]["queued"], mail["delayed"]) == ("mail", 1, 1)
    assert [line.split("\t")[0] for line in cli.run("queues", "list").stdout.splitlines()] == [
        "queue",
        "default",
        "mail",
    ]


def test_pause_and_resume_do_not_change_the_other_control(cli: InProcess) -> None:
    cli.submit("add", "{}")
    assert cli.run("queues", "pause", "default").stdout == "default\tpaused\n"
    assert cli.run("queues", "pause", "default", "--intake").stdout == "default\tpaused, intake paused\n"
    (queue,) = cli.json("queues", "list")
    assert (queue["paused"], queue["intake_paused"]) == (True, True)
    refused = cli.run("submit", "--force", "add", "{}", code=3)
    assert refused.stderr.startswith("holdfast: INTAKE_REFUSED: ")
    assert cli.run("queues", "resume", "default", "--intake").stdout == "default\tpaused\n"
    assert cli.json("queues", "resume", "default")[0]["paused"] is False
    cli.submit("add", "{}")


# doctor, url, errors -------------------------------------------------------------------------------


def test_doctor_accepts_a_new_file(cli: InProcess) -> None:
    cli.submit("add", "{}")
    report = cli.json("doctor")
    assert report["ok"] is True
    checks = {finding["check"]: finding for finding in report["findings"]}
    assert checks["clock"]["ok"]
    assert checks["queue default"]["warning"]
    assert "holdfast worker APP --queue default" in checks["queue default"]["remedy"]
    assert "check\t\tfinding\tremedy" in cli.run("doctor").stdout


def test_the_url_can_be_given_and_a_bad_one_is_refused(cli: InProcess, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/second.db"
    job_id = cli.run("submit", "--force", "add", "{}", "--url", url).stdout.strip()
    assert [job["job_id"] for job in cli.json("jobs", "list", "--url", url)] == [job_id]
    answer = cli.run("jobs", "list", "--url", "ftp://x:secret@y", code=2)
    assert "INVALID_OPTION" in answer.stderr
    assert "secret" not in answer.stderr
    assert "INVALID_OPTION" in cli.run("jobs", "list", "--namespace", "a b", code=2).stderr


@pytest.mark.parametrize("words", [["jobs", "list"], ["jobs", "watch"], ["queues", "list"], ["doctor"]])
def test_reading_a_missing_database_does_not_create_it(cli: InProcess, tmp_path: Path, words: list[str]) -> None:
    assert f"database {tmp_path}/jobs.db does not exist" in cli.run(*words, code=2).stderr
    assert list(tmp_path.iterdir()) == []


def test_an_unreachable_engine_is_exit_code_3(cli: InProcess) -> None:
    answer = cli.run("jobs", "list", "--url", "redis://app:hunter2@127.0.0.1:1/0", code=3)
    warning, error = answer.stderr.splitlines()
    assert "password in --url" in warning
    assert error.startswith("holdfast: ENGINE_UNAVAILABLE: ")
    assert "hunter2" not in answer.stderr


def test_names_and_arguments_are_checked_against_the_app(cli: InProcess, tmp_path: Path) -> None:
    (tmp_path / "checked_sample.py").write_text(SAMPLE_APP)
    unknown = cli.run("submit", "ad", "--app", "checked_sample.py", code=2)
    assert unknown.stderr.startswith("holdfast: UNKNOWN_TASK: ")
    invalid = cli.run("submit", "add", "--app", "checked_sample.py", "--arg", "a=text", code=2)
    assert invalid.stderr.startswith("holdfast: INVALID_PAYLOAD: ")
    assert cli.json("submit", "elsewhere", "--app", "checked_sample.py")["queue"] == "other"
