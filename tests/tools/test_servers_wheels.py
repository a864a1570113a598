"""Installation of a server from a wheel: a file with another checksum is refused."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from tools import servers
from tools.servers import Server, ensure, find

TOY = Server("toy", ("1.0",), "HOLDFAST_TEST_TOY", "toy.json", wheel="toy==1.0", inside="toy/toy.json")


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel in the only folder that the installer searches."""
    monkeypatch.setattr(servers, "WHEELS", tmp_path / "servers")
    monkeypatch.setattr(servers, "CHECKSUMS", tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    file = tmp_path / "toy-1.0-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("toy/toy.json", "{}")
        archive.writestr("toy-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
        archive.writestr("toy-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("toy-1.0.dist-info/RECORD", "toy/toy.json,,\n")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    others = f"toy-extra==1.0 \\\n    --hash=sha256:{'1' * 64}\n"
    pins = f"{others}toy==1.0 \\\n    --hash=sha256:{'0' * 64} \\\n    --hash=sha256:{digest}\n{others}"
    (tmp_path / "servers.txt").write_text(pins)
    return file


def test_a_wheel_with_its_checksum_is_installed(wheel: Path) -> None:
    assert ensure(TOY)
    assert find(TOY) == wheel.parent / "servers" / "toy" / "toy" / "toy.json"


def test_a_forged_wheel_is_refused(wheel: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("toy/more.py", "print('not from the maker')")
    assert not ensure(TOY)
    errors = capfd.readouterr().err
    assert "DO NOT MATCH THE HASHES" in errors
    assert "toy: toy==1.0 was not installed" in errors
    assert not TOY.folder.exists()


def test_a_wheel_without_a_checksum_is_refused(wheel: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (wheel.parent / "servers.txt").write_text("")
    assert not ensure(TOY)
    assert "toy: toy==1.0 was not installed" in capfd.readouterr().err
