"""The list of peers, their environments and their scripts agree. Nothing is installed."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from benchmarks.children import ROOT, Child
from benchmarks.peers import venv
from benchmarks.peers.field import FIELD, ON_POSTGRES, ON_REDIS, Peer, on
from benchmarks.sides.diary import Diary, read
from benchmarks.usage import descendants
from tests.processes import ProcessId

_BY_NAME = pytest.mark.parametrize("peer", FIELD, ids=lambda peer: str(peer.name))


def _script(peer: Peer) -> str:
    return (ROOT / Path(*peer.module.split("."))).with_suffix(".py").read_text()


def test_every_peer_has_a_separate_environment() -> None:
    assert [*(peer.name for peer in FIELD), "faststream"] == list(venv.PEERS)
    assert len({venv.python(name) for name in venv.PEERS}) == len(venv.PEERS)


@pytest.mark.parametrize("name", venv.PEERS)
def test_versions_are_pinned(name: str) -> None:
    environment = venv.PEERS[name]
    assert all("==" in pin for pin in environment.pins)
    assert environment.version[0].isdigit()


def test_the_field_names_every_side_once() -> None:
    sides = [side for peer in FIELD for side in (peer.side, peer.tuned_side)]
    assert len(sides) == len(set(sides))
    assert {peer.store for peer in FIELD} == {ON_REDIS, ON_POSTGRES}
    assert {*on(ON_REDIS), *on(ON_POSTGRES)} == set(FIELD)


@_BY_NAME
def test_a_peer_has_its_settings(peer: Peer) -> None:
    assert peer.settings
    assert peer.bulk
    assert peer.slow
    assert 0 < peer.share <= 1
    # Only peers with jobs in tables have a query for the jobs that are left.
    assert bool(peer.left) == (peer.store == ON_POSTGRES)


@_BY_NAME
def test_a_peers_script_has_all_roles_and_does_not_import_holdfast(peer: Peer) -> None:
    script = _script(peer)
    modules = {node.module for node in ast.walk(ast.parse(script)) if isinstance(node, ast.ImportFrom)}
    assert not [module for module in modules if module and module.startswith("holdfast")]
    for role in ("produce", "work", "slow_work"):
        assert f'"{role}":' in script
    # The script handles tuning if and only if the peer has tuned settings.
    assert ("is_tuned(spec)" in script) == bool(peer.tuned)


def test_an_environment_that_cannot_be_created_is_reported_and_the_others_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(venv, "FOLDER", tmp_path)
    messages: list[str] = []

    def run(command: list[str]) -> str:
        if "venv" in command:
            Path(command[-1], "bin").mkdir(parents=True)
            Path(command[-1], "bin", "python").touch()
        return "not installed: no such version" if any("huey" in word for word in command[1:]) else ""

    monkeypatch.setattr(venv, "_run", run)
    versions = venv.ensure(["huey", "rq"], messages.append)
    assert versions == {"huey": "(not installed: no such version)", "rq": venv.PEERS["rq"].version}
    assert not venv.is_there(versions["huey"])
    assert venv.is_there(versions["rq"])
    assert len(messages) == 3
    # Existing environments are kept; failed ones are created again.
    messages.clear()
    assert venv.ensure(["huey", "rq"], messages.append) == versions
    assert not any(line.startswith("rq") for line in messages)


def test_a_diary_with_a_truncated_line_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "diary"
    assert not read(path).began
    diary = Diary(path)
    for number in (1, 2, 1):
        diary.began(number)
    diary.ended(1)
    diary.ended(1)
    with path.open("a") as file:
        file.write("ended 2 12")
    entries = read(path)
    assert entries.began == {1: 2, 2: 1}
    assert entries.ended == {1: 2}
    assert list(entries.ended_ns) == [1]


def test_children_started_by_any_thread_are_found() -> None:
    started: list[subprocess.Popen[bytes]] = []
    thread = threading.Thread(target=lambda: started.append(subprocess.Popen(["sleep", "60"])))
    thread.start()
    thread.join()
    try:
        assert started[0].pid in descendants(os.getpid())
    finally:
        started[0].kill()
        started[0].wait()


def test_killing_a_child_kills_its_children_too(tmp_path: Path) -> None:
    (tmp_path / "forks.py").write_text(
        "import subprocess, sys\n"
        "child = subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
        "print('{\"pid\": %d}' % child.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    child = Child("forks", "any", {}, tmp_path, sys.executable)
    grandchild = ProcessId.of(child.answer()["pid"])
    child.kill()
    child.close()
    deadline = time.monotonic() + 20
    while grandchild.is_running():
        assert time.monotonic() < deadline, "the grandchild outlived its parent"
        time.sleep(0.02)
