"""Triggers: start a run for each message of a broker queue.

Public: `QueueTrigger`, its configuration and the runtimes that it can call.
"""

from typing import TYPE_CHECKING

from holdfast._exports import lazy_exports as _lazy_exports

if TYPE_CHECKING:
    from holdfast.triggers.config import QueueTriggerConfig
    from holdfast.triggers.http_runtime import HttpRuntime
    from holdfast.triggers.runtime import CallableRuntime
    from holdfast.triggers.task_runtime import TaskRuntime
    from holdfast.triggers.trigger import QueueTrigger

__all__ = ["CallableRuntime", "HttpRuntime", "QueueTrigger", "QueueTriggerConfig", "TaskRuntime"]

__getattr__ = _lazy_exports(
    __name__,
    {
        "CallableRuntime": "holdfast.triggers.runtime",
        "HttpRuntime": "holdfast.triggers.http_runtime",
        "QueueTrigger": "holdfast.triggers.trigger",
        "TaskRuntime": "holdfast.triggers.task_runtime",
        "QueueTriggerConfig": "holdfast.triggers.config",
    },
)
