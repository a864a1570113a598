"""Secrets of the command line: read from files, and in the process list only where a user has typed them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from holdfast.verification.chaos.redis_nodes import call_redis
from tests.cli.harness import Shell, eventually
from tests.conftest import MakeServer

PASSWORD = "swordfish-7f3a"


@pytest.fixture
def guarded_url(make_redis: MakeServer) -> str:
    """A Redis that needs a password."""
    url = urlsplit(make_redis().url)
    assert url.port is not None
    call_redis(url.port, "CONFIG", "SET", "requirepass", PASSWORD)
    return f"redis://:{PASSWORD}@{url.netloc}/0"


def descendants(pid: int) -> set[int]:
    children = {
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    }
    return children.union(*map(descendants, children))


def child_lines(pid: int) -> list[str] | None:
    """The command lines of all descendants, once two worker processes are among them."""
    lines = [Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ") for child in descendants(pid)]
    return lines if len([line for line in lines if "--supervisor" in line]) == 2 else None


@pytest.mark.redis
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
def test_worker_processes_get_a_password_by_environment(shell: Shell, guarded_url: str) -> None:
    arguments = ("sample.py:app", "--processes", "2", "--url", guarded_url, "--no-upkeep")
    with shell.start("worker", *arguments, HOLDFAST_URL="sqlite:///wrong.db") as worker:
        lines = eventually(partial(child_lines, worker.process.pid), what="both processes to run")
        assert lines is not None
        assert [line for line in lines if PASSWORD in line] == []
        # They work on that Redis, not on the one of the environment.
        done = shell.run(
            "submit", "--force", "add", "--arg", "a=40", "--arg", "b=2", "--wait", "30", HOLDFAST_URL=guarded_url
        )
        assert done.stdout == "42\n"
        assert worker.end() == 0
    log = worker.log.read_text()
    assert log.count("is visible in the process list") == 1
    assert PASSWORD not in log


@pytest.mark.redis
def test_a_password_from_a_file_or_a_variable_causes_no_warning(shell: Shell, guarded_url: str, tmp_path: Path) -> None:
    secret = tmp_path / "url"
    secret.write_text(f"{guarded_url}\n")
    del shell.environment["HOLDFAST_URL"]
    for name, value in (("HOLDFAST_URL_FILE", str(secret)), ("HOLDFAST_URL", guarded_url)):
        environment: dict[str, Any] = {name: value}
        done = shell.run("queues", "list", **environment)
        assert done.stderr.strip() in ("", "no queues")


@pytest.mark.parametrize("words", [("queues", "list", "--url"), ("migrate", "status", "--ledger")])
def test_a_password_in_an_argument_causes_one_warning(shell: Shell, words: tuple[str, ...]) -> None:
    url = f"{'redis' if 'queues' in words else 'postgresql'}://u:{PASSWORD}@127.0.0.1:1/0"
    done = shell.run(*words, url, code=None)
    assert done.stderr.count("is visible in the process list") == 1
    assert f"HOLDFAST_{words[-1].removeprefix('--').upper()}_FILE" in done.stderr
    assert PASSWORD not in done.stderr


def test_a_secret_file_that_cannot_be_read_is_one_line_and_exit_code_2(shell: Shell, tmp_path: Path) -> None:
    done = shell.run("queues", "list", HOLDFAST_TOKEN_FILE=str(tmp_path / "missing"), code=2)
    assert done.stderr.startswith("holdfast: INVALID_OPTION: ")
    assert "HOLDFAST_TOKEN_FILE" in done.stderr
    assert len(done.stderr.splitlines()) == 1
