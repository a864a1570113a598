"""holdfast: durable background tasks. Every task reaches exactly one recorded outcome.

The names exported here are public, as are `holdfast.effects`, `holdfast.mongo` and `holdfast.testing`; all else may
change between releases. Errors to catch are in `holdfast.errors`.
"""

import importlib as _importlib
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from holdfast._platform import unsupported as _unsupported
from holdfast._version import __version__
from holdfast.errors import Fatal, Unavailable

if _TYPE_CHECKING:
    from holdfast.app import Holdfast
    from holdfast.client.job import Job
    from holdfast.client.task import Task
    from holdfast.core.job import Approval, Priority
    from holdfast.core.retry import Retry
    from holdfast.core.states import State
    from holdfast.execution.context import Context
    from holdfast.guard.decisions import Allow, Deny, GuardRequest, RequireApproval
    from holdfast.settings import Settings
    from holdfast.worker.worker import Worker

__all__ = [
    "Allow",
    "Approval",
    "Context",
    "Deny",
    "Fatal",
    "GuardRequest",
    "Holdfast",
    "Job",
    "Priority",
    "RequireApproval",
    "Retry",
    "Settings",
    "State",
    "Task",
    "Unavailable",
    "Worker",
    "__version__",
    "errors",
]

#: Modules of the other names, loaded at first use so that `holdfast --version` starts fast.
_HOMES = {
    "Allow": "holdfast.guard.decisions",
    "RequireApproval": "holdfast.guard.decisions",
    "Approval": "holdfast.core.job",
    "Context": "holdfast.execution.context",
    "Deny": "holdfast.guard.decisions",
    "GuardRequest": "holdfast.guard.decisions",
    "Holdfast": "holdfast.app",
    "Job": "holdfast.client.job",
    "Priority": "holdfast.core.job",
    "Retry": "holdfast.core.retry",
    "Settings": "holdfast.settings",
    "State": "holdfast.core.states",
    "Task": "holdfast.client.task",
    "Worker": "holdfast.worker.worker",
}


def __getattr__(name: str) -> _Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if (error := _unsupported()) is not None:
        raise error
    value = getattr(_importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
