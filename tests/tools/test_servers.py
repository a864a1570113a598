"""The catalogue of servers: versions are read without starting a server, and packages start no services."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tools import servers


def write_program(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("layout", ["debian", "archive"])
def test_rabbitmq_is_recognised_by_its_folder_and_not_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    started = tmp_path / "started"
    home = tmp_path / "rabbitmq" if layout == "debian" else tmp_path / "rabbitmq_server-3.13.7"
    binary = write_program(home / "sbin" / "rabbitmq-server", f"touch {started}")
    if layout == "debian":
        (home / "lib" / "rabbitmq_server-3.10.8").mkdir(parents=True)
    monkeypatch.setenv(servers.RABBITMQ.variable, str(binary))
    assert servers.find(servers.RABBITMQ) == binary
    assert not started.exists()


def test_the_wrapper_on_path_is_not_used_as_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = tmp_path / "started"
    write_program(tmp_path / "usr" / "sbin" / "rabbitmq-server", f"touch {started}")
    monkeypatch.setenv("PATH", str(tmp_path / "usr" / "sbin"))
    monkeypatch.setattr(servers, "KNOWN_FOLDERS", ())
    monkeypatch.delenv(servers.RABBITMQ.variable, raising=False)
    assert servers.find(servers.RABBITMQ) is None
    assert not started.exists()


@pytest.mark.parametrize(("ran_before", "stops"), [(False, True), (True, False)])
def test_a_service_that_an_installation_starts_is_stopped_and_no_other(
    monkeypatch: pytest.MonkeyPatch, ran_before: bool, stops: bool
) -> None:
    commands: list[tuple[list[str], dict[str, str]]] = []
    answers = iter([ran_before, True])

    def record(command: list[str], environment: dict[str, str]) -> bool:
        commands.append((command, environment))
        return True

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(servers, "_run", record)
    monkeypatch.setattr(servers, "_service_runs", lambda package: next(answers))
    servers._install_package("rabbitmq-server")
    assert [command[0] for command, _ in commands] == ["apt-get", "apt-get", *(["systemctl"] if stops else [])]
    install, environment = commands[1]
    assert "--no-install-recommends" in install
    assert environment["RUNLEVEL"] == "1"


def test_without_systemd_no_service_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise AssertionError("no command may run")

    monkeypatch.setattr(Path, "is_dir", lambda path: False)
    monkeypatch.setattr(subprocess, "run", fail)
    assert not servers._service_runs("rabbitmq-server")
