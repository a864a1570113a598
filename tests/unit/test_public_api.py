"""The public names, pinned: adding one is a decision, removing one breaks callers."""

from __future__ import annotations

import importlib.metadata
import inspect
import re

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
