"""The tool that runs tests on other releases of Python: which interpreters it takes."""

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


def interpreter(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_an_interpreter_on_path_is_taken(home: Path) -> None:
    python = interpreter(home / "bin" / "python3.12", "echo 3.12")
    interpreter(home / ".pyenv" / "versions" / "3.12.9" / "bin" / "python3.12", "echo 3.12")
    assert pythons.find("3.12") == python
    assert pythons.find("3.13") is None


@pytest.mark.parametrize("script", ["echo pyenv: command not found >&2; exit 127", "echo 3.11"])
def test_one_that_does_not_work_is_passed_over(home: Path, script: str) -> None:
    interpreter(home / "bin" / "python3.12", script)
    assert pythons.find("3.12") is None
    managed = interpreter(home / ".pyenv" / "versions" / "3.12.1" / "bin" / "python3.12", "echo 3.12")
    assert pythons.find("3.12") == managed


def test_without_any_there_is_nothing_to_do(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert pythons.main(["test"]) == 0
    assert capsys.readouterr().out == "Python 3.12: not installed\nPython 3.13: not installed\n"
    assert not (home / "environments").exists()
    assert pythons.main(["try"]) == 2


def test_tests_that_fail_are_shown_and_counted(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    python = interpreter(
        home / "bin" / "python3.12", 'case "$1" in -c) echo 3.12;; *) echo no venv today; exit 3;; esac'
    )
    monkeypatch.setattr(pythons, "_build_wheel", lambda: home / "holdfast.whl")
    pythons.FOLDER.mkdir()
    assert pythons.find("3.12") == python
    assert pythons.main(["test"]) == 1
    assert "no venv today" in capsys.readouterr().out
