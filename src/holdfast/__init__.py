"""holdfast: durable background tasks. Every task reaches exactly one recorded outcome.

What is named here is public, as are `holdfast.effects`, `holdfast.mongo` and `holdfast.testing`; all else may change
between releases.
Errors to catch are in `holdfast.errors`.
"""

from holdfast import errors
from holdfast._version import __version__
from holdfast.app import Holdfast
from holdfast.core.job import Priority
from holdfast.core.retry import Retry
from holdfast.core.states import State
from holdfast.errors import Fatal, Unavailable
from holdfast.handle import Job
from holdfast.settings import Settings
from holdfast.task import Task
from holdfast.worker.context import Context
from holdfast.worker.worker import Worker

__all__ = [
    "Context",
    "Fatal",
    "Holdfast",
    "Job",
    "Priority",
    "Retry",
    "Settings",
    "State",
    "Task",
    "Unavailable",
    "Worker",
    "__version__",
    "errors",
]
