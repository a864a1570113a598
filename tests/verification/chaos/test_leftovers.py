"""However a deployment ends, only its logs are left: no process, no mount, no data."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import UsageError
from holdfast.verification.chaos.deployment import Deployment
from holdfast.verification.chaos.faults import inject
from holdfast.verification.chaos.parts import Disk, Fault, FaultKind
from holdfast.verification.chaos.servers import find_redis
from tests.faults.support import eventually

pytestmark = [pytest.mark.faults, pytest.mark.redis, pytest.mark.postgres]


class Leftovers:
    """What the deployments of one test leave. Other tests start and end deployments at the same time."""

    def __init__(self, folder: Path) -> None:
        self._children = _children()
        #: Below these are all mounts and data.
        self.folders = [folder]

    def check(self) -> None:
        assert _children() <= self._children
        mounts = [Path(line.split()[1]) for line in Path("/proc/mounts").read_text().splitlines()]
        assert not [mount for mount in mounts if any(mount.is_relative_to(folder) for folder in self.folders)]
        assert not (self.folders[0] / "redis" / "disk").exists()
        assert not [folder for folder in self.folders[1:] if (folder / "disk").exists()]


def _children() -> set[int]:
    lists = Path("/proc/self/task").glob("*/children")
    return {int(pid) for file in lists for pid in file.read_text().split()}


@pytest.fixture
def leftovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Leftovers:
    leftovers = Leftovers(tmp_path)
    make = tempfile.mkdtemp

    def record(*args: Any, **kwargs: Any) -> str:
        folder: str = make(*args, **kwargs)
        leftovers.folders.append(Path(folder))
        return folder

    # PostgreSQL has its data outside of the deployment's folder, where its user may read.
    monkeypatch.setattr("holdfast.verification.chaos.servers.tempfile.mkdtemp", record)
    return leftovers


def make_deployment(folder: Path) -> Deployment:
    """Stores and one program only, because each program takes a second of CPU time to start."""
    return Deployment(folder, workers=1, upkeeps=0, servers=0)


@pytest.mark.parametrize(
    "has_reached",
    [
        lambda deployment: "postgres" in deployment.parts and deployment.parts["postgres"].process.started,
        lambda deployment: deployment.direct,
        lambda deployment: "worker-1" in deployment.parts and deployment.parts["worker-1"].process.started,
    ],
    ids=["stores", "token", "programs"],
)
async def test_a_start_that_is_interrupted_leaves_nothing(
    tmp_path: Path, leftovers: Leftovers, has_reached: Callable[[Deployment], bool]
) -> None:
    deployment = make_deployment(tmp_path)
    starting = asyncio.create_task(deployment.start())
    await eventually(lambda: has_reached(deployment), "the start to have reached this point")
    starting.cancel()
    # An impatient user interrupts twice.
    asyncio.get_running_loop().call_later(0.05, starting.cancel)
    with pytest.raises(asyncio.CancelledError):
        await starting
    leftovers.check()
    assert (tmp_path / "postgres.log").exists()


async def test_a_start_that_fails_leaves_nothing(
    tmp_path: Path, leftovers: Leftovers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.verification.chaos.deployment.APP", "no.such.module:app")
    with pytest.raises(RuntimeError, match="ended with"):
        await make_deployment(tmp_path).start()
    leftovers.check()


async def test_a_run_that_is_interrupted_in_the_middle_of_faults_leaves_nothing(
    tmp_path: Path, leftovers: Leftovers
) -> None:
    async def run(ready: asyncio.Event) -> None:
        async with make_deployment(tmp_path) as deployment:
            faults = [
                (FaultKind.STOP, "worker-1"),
                (FaultKind.STOP, "postgres"),
                (FaultKind.STALL, "redis"),
                (FaultKind.STOP, "redis"),
            ]
            if FaultKind.FILL in deployment.parts["redis"].kinds:
                faults.append((FaultKind.FILL, "redis"))
            async with asyncio.TaskGroup() as group:
                for number, (kind, target) in enumerate(faults, 1):
                    group.create_task(inject(deployment, Fault(number, 0, kind, target, 60)))
                await asyncio.sleep(0.3)
                ready.set()

    ready = asyncio.Event()
    running = asyncio.create_task(run(ready))
    await ready.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    leftovers.check()


def test_a_missing_server_is_reported_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="--redis-server"):
        find_redis(tmp_path / "nothing")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("holdfast.verification.chaos.servers._FOLDERS", ())
    with pytest.raises(UsageError, match="apt-get install redis-server"):
        Deployment(tmp_path)


def test_without_root_filling_a_disk_raises_with_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    disk = Disk(tmp_path / "disk")
    disk.mount()
    assert disk.folder.is_dir()
    assert "root" in disk.why_not
    with pytest.raises(RuntimeError, match="root"):
        disk.fill()
    disk.free()
    disk.unmount()
