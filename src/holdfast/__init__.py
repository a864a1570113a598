"""holdfast: durable background tasks. Every task reaches exactly one recorded outcome.

Public are the names that this package and `holdfast.brokers`, `effects`, `engine`, `http`, `ledger`, `mongo`,
`observe`, `operations`, `outbox`, `testing`, `triggers` and `webhooks` export; all else may change between releases.
Errors to catch are in `holdfast.errors`.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from holdfast._exports import lazy_exports as _lazy_exports
from holdfast._version import __version__
from holdfast.errors import Fatal, Unavailable

if _TYPE_CHECKING:
    from holdfast.app import Holdfast
    from holdfast.client.job import Job
    from holdfast.client.task import Task
    from holdfast.core.job import Approval, JobInfo, Priority
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
    "JobInfo",
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

# Loaded at first use, so that `holdfast --version` starts fast.
__getattr__ = _lazy_exports(
    __name__,
    {
        "Allow": "holdfast.guard.decisions",
        "RequireApproval": "holdfast.guard.decisions",
        "Approval": "holdfast.core.job",
        "Context": "holdfast.execution.context",
        "Deny": "holdfast.guard.decisions",
        "GuardRequest": "holdfast.guard.decisions",
        "Holdfast": "holdfast.app",
        "Job": "holdfast.client.job",
        "JobInfo": "holdfast.core.job",
        "Priority": "holdfast.core.job",
        "Retry": "holdfast.core.retry",
        "Settings": "holdfast.settings",
        "State": "holdfast.core.states",
        "Task": "holdfast.client.task",
        "Worker": "holdfast.worker.worker",
    },
)


def __dir__() -> list[str]:
    return __all__
