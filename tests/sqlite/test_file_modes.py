"""New files are private whatever the umask; `doctor` reports files that other users can access."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast import Holdfast
from holdfast.execution.backend import backend_of

_SUFFIXES = ("", "-wal", "-shm", "-lock", "-queue")


@pytest.fixture(params=[0o000, 0o022, 0o777])
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def modes(path: Path) -> dict[str, int]:
    return {suffix: stat.S_IMODE(os.stat(f"{path}{suffix}").st_mode) for suffix in _SUFFIXES}


@pytest.mark.usefixtures("umask")
async def test_the_files_of_a_new_embedded_database_are_private(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    async with Holdfast(f"sqlite:///{path}") as app:
        await backend_of(app).engine.now_ms()
        assert modes(path) == dict.fromkeys(_SUFFIXES, 0o600)


@pytest.mark.redis
@pytest.mark.usefixtures("open_umask")
async def test_the_files_of_a_new_ledger_are_private(tmp_path: Path, redis_url: str, namespace: str) -> None:
    path = tmp_path / "ledger.db"
    async with Holdfast(redis_url, ledger=f"sqlite:///{path}", namespace=namespace) as app:
        ledger = backend_of(app).ledger
        assert ledger is not None
        await ledger.operators.tokens()
        assert modes(path) == dict.fromkeys(_SUFFIXES, 0o600)
        assert not [each for each in await ledger.diagnose() if each.check == "permissions"]
        os.chmod(f"{path}-wal", 0o644)
        (finding,) = [each for each in await ledger.diagnose() if each.check == "permissions"]
        assert (finding.ok, finding.warning) == (False, True)
        assert f"chmod 600 {path}-wal" in finding.remedy


@pytest.mark.usefixtures("open_umask")
async def test_modes_of_existing_files_stay_and_doctor_reports_them(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    os.close(os.open(path, os.O_CREAT, 0o660))
    os.close(os.open(f"{path}-lock", os.O_CREAT, 0o604))
    async with Holdfast(f"sqlite:///{path}") as app:
        engine = backend_of(app).engine
        (finding,) = [each for each in await engine.diagnose([]) if each.check == "permissions"]
        # New files next to a shared database are as accessible as the database.
        assert modes(path) == {**dict.fromkeys(_SUFFIXES, 0o660), "-lock": 0o604}
    assert (finding.ok, finding.warning) == (False, True)
    assert str(path) in finding.message
    assert f"{path}-lock" in finding.message
