"""Fingerprints of schemas: the same in every process, different when a payload may not fit."""

from __future__ import annotations

import subprocess
import sys
from typing import Annotated, Any

import msgspec
import pytest
from pydantic import BaseModel

from holdfast import Context
from holdfast.execution.spec import TaskPolicy, TaskSpec

#: Written down: another value here means that a new release, or another version of Python or of a library, does not
#: recognise the schemas of submissions before it.
KNOWN = "39c4bce5"
SOURCE = """
from dataclasses import dataclass
from holdfast.execution.spec import TaskPolicy, TaskSpec

@dataclass
class Point:
    x: int
    y: float = 0.5

async def draw(points: list[Point], colour: str | None = None, *, width: int = 1) -> None: ...

print(TaskSpec("draw", draw, TaskPolicy()).fingerprint)
"""


class Model(BaseModel):
    name: str


class Strange:
    """Neither msgspec nor pydantic can describe it."""


def fingerprint(function: Any) -> str:
    return TaskSpec("t", function, TaskPolicy()).fingerprint


def test_the_fingerprint_is_stable() -> None:
    for seed in ("0", "1"):
        done = subprocess.run(
            [sys.executable, "-c", SOURCE], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == KNOWN


def test_what_decides_about_payloads_is_covered() -> None:
    def base(a: int, b: str = "x") -> None: ...

    def other_type(a: float, b: str = "x") -> None: ...

    def required(a: int, b: str) -> None: ...

    def more(a: int, b: str = "x", c: int = 1) -> None: ...

    def renamed(a: int, d: str = "x") -> None: ...

    def bounded(a: Annotated[int, msgspec.Meta(ge=0)], b: str = "x") -> None: ...

    def model(a: Model, b: str = "x") -> None: ...

    every = [fingerprint(each) for each in (base, other_type, required, more, renamed, bounded, model)]
    assert len(set(every)) == len(every)


def test_what_does_not_decide_is_not_covered() -> None:
    def base(a: int, b: str = "x") -> None: ...

    def other_default(a: int, b: str = "y") -> None:
        """Documented."""

    def with_context(ctx: Context, a: int, b: str = "x") -> None: ...

    async def is_async(a: int, b: str = "x") -> int:
        return 1

    def with_remarks(a: Annotated[int, msgspec.Meta(description="a number", title="A")], b: str = "x") -> None: ...

    assert len({fingerprint(each) for each in (base, other_default, with_context, is_async, with_remarks)}) == 1


def test_arguments_that_cannot_be_described_have_a_fingerprint() -> None:
    def odd(a: Strange, b: int = 1) -> None: ...

    def odd_too(a: Strange, c: int = 1) -> None: ...

    spec = TaskSpec("t", odd, TaskPolicy())
    assert spec.schema is None
    assert len(spec.fingerprint) == 8
    assert spec.fingerprint != fingerprint(odd_too)


@pytest.mark.parametrize("name", ["title", "description", "default", "examples", "required"])
def test_a_parameter_may_have_the_name_of_a_keyword(name: str) -> None:
    def one(title: int, description: int, default: int, examples: int, required: int) -> None: ...

    def other(title: int, description: int, default: int, examples: int, required: int) -> None: ...

    other.__annotations__[name] = "str"
    assert fingerprint(one) != fingerprint(other)
