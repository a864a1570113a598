"""The tool that runs tests on other Python releases: which interpreters it uses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import pythons


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder without version managers, and a PATH with one empty folder on it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(pythons, "FOLDER", tmp_path / "environments")
    return tmp_path


def write_interpreter(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_an_interpreter_on_path_is_used(home: Path) -> None:
    python = write_interpreter(home / "bin" / "python3.12", "echo 3.12")
    write_interpreter(home / ".pyenv" / "versions" / "3.12.9" / "bin" / "python3.12", "echo 3.12")
    assert pythons.find("3.12") == python
    assert pythons.find("3.13") is None


@pytest.mark.parametrize("script", ["echo pyenv: command not found >&2; exit 127", "echo 3.11"])
def test_a_broken_interpreter_is_skipped(home: Path, script: str) -> None:
    write_interpreter(home / "bin" / "python3.12", script)
    assert pythons.find("3.12") is None
    managed = write_interpreter(home / ".pyenv" / "versions" / "3.12.1" / "bin" / "python3.12", "echo 3.12")
    assert pythons.find("3.12") == managed


def test_without_interpreters_nothing_is_run(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert pythons.main(["test"]) == 0
    assert capsys.readouterr().out == "Python 3.12: not installed\nPython 3.13: not installed\n"
    assert not (home / "environments").exists()
    assert pythons.main(["try"]) == 2


def test_failed_runs_are_printed_and_counted(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    python = write_interpreter(
        home / "bin" / "python3.12", 'case "$1" in -c) echo 3.12;; *) echo no venv today; exit 3;; esac'
    )
    monkeypatch.setattr(pythons, "_build_wheel", lambda: home / "holdfast.whl")
    pythons.FOLDER.mkdir()
    assert pythons.find("3.12") == python
    assert pythons.main(["test"]) == 1
    assert "no venv today" in capsys.readouterr().out
