"""`TaskSpec`: everything needed to run a task's jobs, computed once when the task is registered.

`TaskLocation` finds a task in another process. A child process imports the module that defines the function, by name
if it has one, otherwise from its file, and gets the task from a module-level name or from an app in the module.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from types import ModuleType
from typing import Any, Final

import msgspec

from holdfast.core.codec import PAYLOAD_LIMIT, Arguments, Results
from holdfast.core.job import Claim
from holdfast.core.retry import Retry
from holdfast.core.verdict import OnExhausted
from holdfast.errors import InvalidOption
from holdfast.execution.context import Context
from holdfast.execution.task_schema import Schema, describe_arguments, fingerprint_of


class ExecutionMode(Enum):
    """Where a function runs."""

    #: `async def`: an asyncio task on the worker's event loop.
    LOOP = auto()
    #: `def`: a thread. Cannot be stopped from outside.
    THREAD = auto()
    #: `process=True`: a child process, killed on timeout, cancellation or a lost lease.
    PROCESS = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPolicy:
    """How a task's jobs are handled when they fail or take too long."""

    retry: Retry = field(default_factory=Retry)
    timeout_ms: int | None = None
    on_exhausted: OnExhausted = OnExhausted.DEAD_LETTER
    retry_on: tuple[type[BaseException], ...] = ()
    fatal_on: tuple[type[BaseException], ...] = ()
    unavailable_on: tuple[type[BaseException], ...] = ()
    process: bool = False


class TaskSpec:
    """A function, its arguments, and its policy."""

    __slots__ = (
        "arguments",
        "context_name",
        "decode",
        "fingerprint",
        "function",
        "mode",
        "name",
        "payload_limit",
        "policy",
        "results",
        "timeout_s",
    )

    def __init__(
        self, name: str, function: Callable[..., Any], policy: TaskPolicy, payload_limit: int = PAYLOAD_LIMIT
    ) -> None:
        self.name = name
        self.function = function
        self.policy = policy
        self.payload_limit = payload_limit
        self.arguments = Arguments(function, name, Context)
        self.decode = self.arguments.decode
        self.context_name = self.arguments.injected_name
        self.mode = _mode(name, function, policy)
        self.timeout_s = None if policy.timeout_ms is None else policy.timeout_ms / 1000
        self.results = Results(function, name)
        #: Of the schema; submissions carry it. An attribute, because every submission reads it.
        self.fingerprint = fingerprint_of(self.arguments.struct, self.schema)

    @property
    def schema(self) -> Schema | None:
        """The JSON Schema of the arguments; None if they cannot be described."""
        return describe_arguments(self.arguments.struct)

    def bind(self, claim: Claim, context: Context | None) -> dict[str, Any]:
        """Keyword arguments for one run; raises `InvalidPayload`."""
        arguments = self.decode(claim.payload)
        if self.context_name is not None:
            arguments[self.context_name] = context
        return arguments


def _mode(name: str, function: Callable[..., Any], policy: TaskPolicy) -> ExecutionMode:
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise InvalidOption(f"task {name!r} is a generator; return one value instead")
    if policy.process:
        return ExecutionMode.PROCESS
    return ExecutionMode.LOOP if inspect.iscoroutinefunction(function) else ExecutionMode.THREAD


#: The name that `multiprocessing` gives to a main module in a child, so that `if __name__ == "__main__":` is false.
_MAIN_ALIAS: Final = "__mp_main__"


class TaskLocation(msgspec.Struct, frozen=True):
    """Where a task is defined. If the module name is empty, the file is loaded."""

    module: str
    file: str
    task: str


def locate(spec: TaskSpec) -> TaskLocation:
    """The location of a task; raises `InvalidOption` if a child could not find it there."""
    name = spec.function.__module__
    module = sys.modules.get(name)
    if module is None or find_task(module, spec.name) is not spec:
        raise InvalidOption(
            f"task {spec.name!r} has process=True, but a child process cannot find it in module {name!r}; "
            "define it, or its app, at the module's top level"
        )
    file = getattr(module, "__file__", None) or ""
    if name == "__main__":
        # Started with `-m`, the module's spec has the real name; a script has none.
        imported = getattr(module, "__spec__", None)
        return TaskLocation("" if imported is None or imported.name == name else imported.name, file, spec.name)
    return TaskLocation(name, file, spec.name)


def load_task(location: TaskLocation, *, in_memory: bool = False) -> TaskSpec:
    """Load the task at this location, in the child. `in_memory` moves the module's apps into memory."""
    module = importlib.import_module(location.module) if location.module else _load_file(location.file)
    spec = find_task(module, location.task)
    if spec is None:
        raise InvalidOption(f"module {module.__name__!r} has no task {location.task!r} in the child process")
    if in_memory:
        for value in _ours(module):
            if isinstance(getattr(value, "tasks", None), Mapping):
                value.configure(url="sqlite://")
    return spec


def find_task(module: ModuleType, task: str) -> TaskSpec | None:
    """The spec of a task that is, or whose app is, at a module's top level."""
    apps: list[Mapping[str, Any]] = []
    for value in _ours(module):
        spec = getattr(value, "spec", None)
        if isinstance(spec, TaskSpec) and spec.name == task:
            return spec
        tasks = getattr(value, "tasks", None)
        if isinstance(tasks, Mapping):
            apps.append(tasks)
    specs = (getattr(tasks.get(task), "spec", None) for tasks in apps)
    return next((spec for spec in specs if isinstance(spec, TaskSpec)), None)


def _ours(module: ModuleType) -> list[Any]:
    """Apps, tasks and other objects of holdfast's types at a module's top level."""
    values = list(vars(module).values())
    return [value for value in values if any(base.__module__.startswith("holdfast.") for base in type(value).__mro__)]


# Cached here, not in sys.modules: importing `multiprocessing` puts the child's own main module there.
@functools.cache
def _load_file(file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(_MAIN_ALIAS, file)
    if spec is None or spec.loader is None:
        raise InvalidOption(f"the task's module has no file that a child process could load ({file!r})")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MAIN_ALIAS] = sys.modules["__main__"] = module
    spec.loader.exec_module(module)
    return module
