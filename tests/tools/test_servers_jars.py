"""Installation of a server from jars: complete or not at all."""

from __future__ import annotations

import hashlib
import stat
from pathlib import Path

import pytest

from tools import servers
from tools.servers import KAFKA, SERVERS, ensure, find, main

JAR = "kafka_2.13-3.9.1.jar"
NOTHING = hashlib.sha256(b"").hexdigest()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install servers here, with only the programs that the test puts into `bin`."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setattr(servers, "WHEELS", tmp_path / "servers")
    monkeypatch.setattr(servers, "CHECKSUMS", tmp_path)
    KAFKA.checksums.write_text(f"{NOTHING}  {JAR}\n")
    monkeypatch.setattr(servers, "_install_package", lambda package: None)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv(KAFKA.variable, raising=False)
    return tmp_path


def write_program(folder: Path, name: str, text: str = "") -> None:
    path = folder / "bin" / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def write_maven(folder: Path, exit_code: int, *, content: str = "", jars: tuple[str, ...] = (JAR,)) -> None:
    """Write a fake `mvn` that copies the jars to the output folder and exits with the given code."""
    copy = "; ".join(f'/bin/mkdir -p "${{word#*=}}"; printf "{content}" > "${{word#*=}}/{jar}"' for jar in jars)
    words = f'for word; do case "$word" in -DoutputDirectory=*) {copy};; esac; done'
    write_program(folder, "mvn", f"{words}; exit {exit_code}")


def test_jars_are_installed_and_found(folder: Path) -> None:
    write_program(folder, "java")
    write_maven(folder, 0)
    assert ensure(KAFKA)
    assert find(KAFKA) == folder / "servers" / "kafka-3.9.1" / "libs" / JAR
    project = (folder / "servers" / "kafka-3.9.1" / "pom.xml").read_text()
    assert "<artifactId>kafka_2.13</artifactId><version>3.9.1</version>" in project
    # The repository is configured on the machine.
    assert "repository" not in project


def test_a_failed_installation_leaves_no_folder(folder: Path) -> None:
    write_program(folder, "java")
    write_maven(folder, 1)
    assert not ensure(KAFKA)
    assert not (folder / "servers" / "kafka-3.9.1").exists()


def test_a_failed_installation_keeps_the_old_one(folder: Path) -> None:
    write_program(folder, "java")
    write_maven(folder, 0)
    assert ensure(KAFKA)
    write_maven(folder, 1)
    assert ensure(KAFKA)


@pytest.mark.parametrize(
    ("content", "jars", "refused"),
    [
        ("forged", (JAR,), f"{JAR} refused: its SHA-256 is {hashlib.sha256(b'forged').hexdigest()}"),
        ("", (JAR, "extra-1.0.jar"), f"extra-1.0.jar refused: its SHA-256 is {NOTHING}, kafka-3.9.1.sha256 has none"),
    ],
)
def test_a_jar_with_another_checksum_is_refused(
    folder: Path, capfd: pytest.CaptureFixture[str], content: str, jars: tuple[str, ...], refused: str
) -> None:
    write_program(folder, "java")
    write_maven(folder, 0, content=content, jars=jars)
    assert not ensure(KAFKA)
    assert refused in capfd.readouterr().err.replace(f"{folder.name}/", "")
    assert list((folder / "servers").iterdir()) == []


def test_a_jar_that_was_not_downloaded_is_refused(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_program(folder, "java")
    write_maven(folder, 0)
    KAFKA.checksums.write_text(f"{NOTHING}  {JAR}\n{NOTHING}  log4j-1.jar\n")
    assert not ensure(KAFKA)
    assert "log4j-1.jar refused: its SHA-256 is unknown, it was not downloaded" in capfd.readouterr().err


def test_checksums_are_written_for_the_resolved_jars(folder: Path) -> None:
    write_maven(folder, 0, content="new", jars=(JAR, "a.jar"))
    assert main(["checksums"]) == 0
    digest = hashlib.sha256(b"new").hexdigest()
    assert KAFKA.checksums.read_text() == f"{digest}  a.jar\n{digest}  {JAR}\n"
    write_maven(folder, 1)
    assert main(["checksums"]) == 1


def test_every_download_has_its_checksum() -> None:
    pinned = (servers.CHECKSUMS / "servers.txt").read_text()
    for server in SERVERS:
        assert not server.wheel or f"{server.wheel} \\\n    --hash=sha256:" in pinned
        assert not server.artifact or server.binary in server.checksums.read_text()


def test_a_server_without_its_programs_is_reported_missing(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert not ensure(KAFKA)
    assert "apt-get install maven" in capfd.readouterr().err
    write_maven(folder, 0)
    # Jars without Java are not a server.
    assert not ensure(KAFKA)
    write_program(folder, "java")
    assert find(KAFKA) is not None


def test_another_jar_can_be_configured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_program(folder, "java")
    named = folder / JAR
    named.touch()
    monkeypatch.setenv(KAFKA.variable, str(named))
    assert find(KAFKA) == named
    monkeypatch.setenv(KAFKA.variable, str(named.rename(folder / "kafka_2.13-2.8.0.jar")))
    assert find(KAFKA) is None


@pytest.mark.parametrize(("ci", "exit_code"), [("true", 1), ("", 0)])
def test_a_missing_server_is_an_error_in_ci_only(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ci: str, exit_code: int
) -> None:
    monkeypatch.setenv("CI", ci)
    monkeypatch.setattr(servers, "SERVERS", (KAFKA,))
    assert main(["list"]) == exit_code
    assert "missing: python tools/servers.py ensure" in capsys.readouterr().out
    assert main(["remove"]) == 2


def test_names_are_unique() -> None:
    assert len({server.name for server in SERVERS}) == len(SERVERS)
    assert len({server.variable for server in SERVERS}) == len(SERVERS)
