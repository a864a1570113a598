"""The public names, pinned: adding one is a decision, removing one breaks callers."""

from __future__ import annotations

import importlib.metadata
import inspect
import re
import subprocess
import sys
from pathlib import Path

import holdfast
from holdfast import errors
from holdfast.errors import HoldfastError

NAMES = {
    "Allow",
    "RequireApproval",
    "Approval",
    "Context",
    "Deny",
    "Fatal",
    "GuardRequest",
    "Holdfast",
    "Job",
    "JobInfo",
    "Priority",
    "Retry",
    "Settings",
    "State",
    "Task",
    "Unavailable",
    "Worker",
    "__version__",
    "errors",
}

#: Members of an app. Everything else is in its backend, for holdfast's own packages.
APP_MEMBERS = {
    "close",
    "configure",
    "engine",
    "guard",
    "job",
    "ledger",
    "open",
    "outbox",
    "settings",
    "submit_raw",
    "task",
    "tasks",
}

#: Packages that an app which only submits has no use for.
NOT_FOR_PRODUCERS = ("cli", "http", "testing", "triggers", "upkeep", "verification", "worker")

#: Submits a job to a file, reads its state, and prints which modules of holdfast that has loaded.
PRODUCER = """
import asyncio, sys
from holdfast import Holdfast

app = Holdfast("sqlite:///producer.db")

@app.task
async def add(a: int, b: int) -> int:
    return a + b

async def main():
    async with app:
        job = await add.submit(1, 2)
        assert (await job.state()) == "queued"

asyncio.run(main())
print(*(name for name in sys.modules if name.startswith("holdfast")))
"""


def test_the_public_names_are_pinned() -> None:
    assert set(holdfast.__all__) == NAMES
    assert sorted(holdfast.__all__, key=str) == sorted(NAMES)
    assert all(hasattr(holdfast, name) for name in NAMES)


def test_nothing_else_is_public_by_accident() -> None:
    unexpected = {
        name
        for name, value in vars(holdfast).items()
        if not name.startswith("_") and name not in NAMES and not inspect.ismodule(value)
    }
    assert unexpected == {"annotations"} & unexpected


def test_the_members_of_an_app_are_these() -> None:
    app = holdfast.Holdfast("sqlite://")
    assert {name for name in dir(app) if not name.startswith("_")} == APP_MEMBERS


def test_an_app_that_only_submits_loads_neither_worker_nor_upkeep(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PRODUCER], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    loaded = ran.stdout.split()
    assert "holdfast.client.submitter" in loaded
    assert [name for name in loaded if name.split(".")[1:2] and name.split(".")[1] in NOT_FOR_PRODUCERS] == []


def test_every_error_can_be_caught_from_one_module() -> None:
    raised = {
        name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, HoldfastError)
    }
    assert {"HoldfastError", "TransitionInvalid", "EngineUnavailable", "InvalidPayload", "JobFailed"} <= raised
    assert holdfast.errors is errors


def test_the_version_is_single_sourced() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", holdfast.__version__)
    assert importlib.metadata.version("holdfast") == holdfast.__version__


def test_public_classes_have_docstrings() -> None:
    undocumented = [
        name for name in NAMES if inspect.isclass(getattr(holdfast, name)) and not getattr(holdfast, name).__doc__
    ]
    assert undocumented == []
