"""Finding a task again in another process.

A child process imports the module that defines the function, by name if it has one, else from its file,
and takes the task from there: from a module-level name, or from an app that the module holds.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any, Final

import msgspec

from holdfast.errors import InvalidOption
from holdfast.worker.plan import Plan

#: What `multiprocessing` calls a main module in a child, so that `if __name__ == "__main__":` stays off.
_MAIN_ALIAS: Final = "__mp_main__"


class Place(msgspec.Struct, frozen=True):
    """Where a task is defined. An empty module name: load the file."""

    module: str
    file: str
    task: str


def locate(plan: Plan) -> Place:
    """The place of a task, checked; `InvalidOption` if a child could not find it there."""
    name = plan.function.__module__
    module = sys.modules.get(name)
    if module is None or find(module, plan.name) is not plan:
        raise InvalidOption(
            f"task {plan.name!r} has process=True, but a child process cannot find it in module {name!r}; "
            "define it, or its app, at the module's top level"
        )
    file = getattr(module, "__file__", None) or ""
    if name == "__main__":
        # Started with `-m` it has its real name here; a script has none.
        spec = getattr(module, "__spec__", None)
        return Place("" if spec is None or spec.name == name else spec.name, file, plan.name)
    return Place(name, file, plan.name)


def load(place: Place, *, in_memory: bool = False) -> Plan:
    """In the child: the task at that place. With `in_memory` the module's apps are moved there."""
    module = importlib.import_module(place.module) if place.module else _load_file(place.file)
    plan = find(module, place.task)
    if plan is None:
        raise InvalidOption(f"module {module.__name__!r} has no task {place.task!r} in the child process")
    if in_memory:
        for value in _ours(module):
            if isinstance(getattr(value, "plans", None), Mapping):
                value.configure(url="sqlite://")
    return plan


def find(module: ModuleType, task: str) -> Plan | None:
    """The plan of a task that is, or whose app is, at a module's top level."""
    apps: list[Mapping[str, Any]] = []
    for value in _ours(module):
        plan = getattr(value, "plan", None)
        if isinstance(plan, Plan) and plan.name == task:
            return plan
        plans = getattr(value, "plans", None)
        if isinstance(plans, Mapping):
            apps.append(plans)
    return next((plans[task] for plans in apps if isinstance(plans.get(task), Plan)), None)


def _ours(module: ModuleType) -> list[Any]:
    """Apps and tasks at a module's top level, and whatever else of holdfast is there."""
    values = list(vars(module).values())
    return [value for value in values if any(base.__module__.startswith("holdfast.") for base in type(value).__mro__)]


# Cached here, not looked up in sys.modules: importing `multiprocessing` puts the child's own main module there.
@functools.cache
def _load_file(file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(_MAIN_ALIAS, file)
    if spec is None or spec.loader is None:
        raise InvalidOption(f"the task's module has no file that a child process could load ({file!r})")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MAIN_ALIAS] = sys.modules["__main__"] = module
    spec.loader.exec_module(module)
    return module
