"""Results are checked against the return annotation before they are stored, and read as the declared type."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NoReturn

import msgspec
import pytest
from pydantic import BaseModel

from holdfast import Context, Holdfast, Retry, State
from holdfast.errors import InvalidResult, JobFailed
from holdfast.testing.inline import inline
from tests.execution import process_tasks
from tests.worker.support import eventually, working

AT_ONCE = Retry(max_retries=3, base=0, jitter=None)


class Model(BaseModel):
    name: str
    at: datetime


class Tree(msgspec.Struct):
    value: int
    children: list[Tree] = []


@dataclass
class Point:
    x: int
    y: int | None = None


AT = datetime(2026, 1, 2, tzinfo=UTC)

#: Annotation, returned value, and what the caller gets.
FITS: dict[str, tuple[Any, Any, Any]] = {
    "int": (int, 5, 5),
    "an int for a float": (float, 1, 1.0),
    "None": (None, None, None),
    "a model": (Model, Model(name="a", at=AT), Model(name="a", at=AT)),
    "a dict for a model": (Model, {"name": "a", "at": "2026-01-02T00:00:00Z"}, Model(name="a", at=AT)),
    "a dict for a recursive struct": (
        Tree,
        {"value": 1, "children": [{"value": 2}]},
        Tree(1, [Tree(2)]),
    ),
    "no dataclass": (Point | None, None, None),
    "a nested dataclass": (dict[str, list[Point]], {"a": [{"x": 1}]}, {"a": [Point(1)]}),
    "a tuple": (tuple[int, str], (1, "a"), (1, "a")),
    "a set": (set[int], {1, 2}, {1, 2}),
}

UNFIT: dict[str, tuple[Any, Any]] = {
    "text for an int": (int, "no"),
    "text for a model": (Model, "no"),
    "a model that lacks a field": (Model, {"name": "a"}),
    "something for None": (None, 5),
    "a nested value": (dict[str, list[Point]], {"a": [{"x": "one"}]}),
    "a number that JSON does not have": (float, float("nan")),
    "a struct with a wrong field": (Tree, Tree(value="one")),  # type: ignore[arg-type]
    "a return of a function that does not return": (NoReturn, None),
}


def returning(app: Holdfast, annotation: Any, value: Any, kind: str, **options: Any) -> tuple[Any, list[int]]:
    """A task that returns the value, and the list of its runs."""
    runs: list[int] = []

    def plain() -> Any:
        runs.append(1)
        return value

    async def on_loop() -> Any:
        return plain()

    function: Any = on_loop if kind == "loop" else plain
    function.__annotations__["return"] = annotation
    return app.task(name="returning", retry=AT_ONCE, **options)(function), runs


async def wait_state(app: Holdfast, job: Any, state: State) -> Any:
    async def reached() -> bool:
        return (await job.state()) is state

    await eventually(reached, str(state))
    return await job.info()


@pytest.mark.parametrize("case", FITS.values(), ids=FITS.keys())
async def test_a_result_that_fits_is_read_as_declared(app: Holdfast, case: tuple[Any, Any, Any]) -> None:
    annotation, value, expected = case
    task, _ = returning(app, annotation, value, "loop")
    async with working(app):
        job = await task.submit()
        result = await job.result(60)
        assert (type(result), result) == (type(expected), expected)
        assert await asyncio.to_thread(lambda: job.result_sync(60)) == expected


@pytest.mark.parametrize("case", UNFIT.values(), ids=UNFIT.keys())
async def test_a_result_that_does_not_fit_is_a_dead_letter(app: Holdfast, case: tuple[Any, Any]) -> None:
    task, runs = returning(app, *case, "loop")
    async with working(app):
        with pytest.raises(JobFailed, match="the result of task 'returning' does not fit its annotation") as caught:
            await (await task.submit()).result(60)
    assert caught.value.error_code == "INVALID_RESULT"
    assert len(runs) == 1


@pytest.mark.parametrize("kind", ["loop", "thread"])
async def test_both_engines_record_a_result_that_does_not_fit(both: Holdfast, kind: str) -> None:
    """It is not retried, because what the function did has happened."""
    task, runs = returning(both, int, "no", kind)
    async with working(both):
        job = await task.submit()
        with pytest.raises(JobFailed) as caught:
            await job.result(60)
        assert (caught.value.state, caught.value.error_code) == ("failed", "INVALID_RESULT")
        info = await job.info()
    assert (len(runs), info.attempt, info.meta.retry_count, info.result) == (1, 1, 0, None)
    assert "Expected `int`, got `str`" in info.failure.message
    assert (await both.engine.stats("default")).dead_letters == 1


async def test_a_result_that_does_not_fit_follows_the_policy_of_its_task(both: Holdfast) -> None:
    task, runs = returning(both, Model, {}, "loop", on_exhausted="suspend")
    async with working(both):
        info = await wait_state(both, await task.submit(), State.SUSPENDED)
    assert (info.failure.code, len(runs)) == ("INVALID_RESULT", 1)


async def test_inline_mode_checks_results() -> None:
    app = Holdfast("redis://127.0.0.1:1")
    task, runs = returning(app, int, "no", "thread")
    model: Any = app.task(name="model")(lambda: {"name": "a", "at": AT})
    with inline(app):
        with pytest.raises(JobFailed) as caught:
            await (await task.submit()).result()
        assert await (await model.submit()).result() == {"name": "a", "at": "2026-01-02T00:00:00Z"}
    assert (caught.value.error_code, len(runs)) == ("INVALID_RESULT", 1)
    await app.close()


async def test_child_processes_check_results(url: str) -> None:
    process_tasks.app.configure(url=url, heartbeat_interval_s=0.1, reclaim_interval_s=0.1)
    async with process_tasks.app, working(process_tasks.app):
        job = await process_tasks.wrong_result.submit()
        with pytest.raises(JobFailed) as caught:
            await job.result(60)
        assert caught.value.error_code == "INVALID_RESULT"
        assert (await job.info()).attempt == 1
        assert await (await process_tasks.place.submit(3)).result(60) == process_tasks.Spot(3)


async def test_a_result_that_does_not_fit_after_the_timeout_is_not_retried(app: Holdfast) -> None:
    runs: list[int] = []

    @app.task(timeout=0.05, retry=AT_ONCE)
    async def finish_anyway() -> int:
        runs.append(1)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return "just made it"  # type: ignore[return-value]
        return 0

    async with working(app):
        with pytest.raises(JobFailed) as caught:
            await (await finish_anyway.submit()).result(60)
    assert (caught.value.error_code, len(runs)) == ("INVALID_RESULT", 1)


async def test_a_stored_result_that_does_not_fit_is_an_error_for_the_caller(both: Holdfast) -> None:
    """A worker with another annotation has stored it."""
    worker = Holdfast(both.settings.url, namespace=both.settings.namespace)

    @worker.task(name="count")
    async def count_old() -> str:
        return "many"

    @both.task
    async def count() -> int:
        return 1

    async with worker, working(worker):
        job = await count.submit()
        with pytest.raises(InvalidResult, match=r"app\.job\(…\)\.result\(\) returns it as plain values"):
            await job.result(60)
        assert await both.job(job.id).result(60) == "many"


def unannotated():  # type: ignore[no-untyped-def]
    return {"any": "thing"}


def annotated_any() -> Any:
    return {"any": "thing"}


def unresolvable() -> Nowhere:  # type: ignore[name-defined]  # noqa: F821
    return {"any": "thing"}


def two_structs() -> Tree | Other:
    return {"any": "thing"}  # type: ignore[return-value]


def not_json() -> Iterator[int]:
    return {"any": "thing"}  # type: ignore[return-value]


def awaitable() -> Awaitable[int]:
    return {"any": "thing"}  # type: ignore[return-value]


class Other(msgspec.Struct):
    value: int


UNCHECKED = {
    unannotated: "it has no return annotation",
    annotated_any: "annotated as Any",
    unresolvable: "name 'Nowhere' is not defined",
    two_structs: "Struct",
    not_json: "Iterator",
    awaitable: "Awaitable",
}


@pytest.mark.parametrize("function", UNCHECKED, ids=lambda function: function.__name__)
async def test_an_annotation_that_cannot_be_checked_is_accepted_and_warned_of(
    app: Holdfast, caplog: pytest.LogCaptureFixture, function: Any
) -> None:
    with caplog.at_level(logging.WARNING, "holdfast.tasks"):
        task = app.task(function)
    (record,) = [record for record in caplog.records if record.name == "holdfast.tasks"]
    assert record.levelno == logging.WARNING
    assert f"results of task '{function.__name__}' are not checked" in record.getMessage()
    assert UNCHECKED[function] in record.getMessage()
    async with working(app):
        assert await (await task.submit()).result(60) == {"any": "thing"}


async def test_annotations_that_can_be_checked_are_not_warned_of(
    app: Holdfast, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "holdfast.tasks"):
        for number, annotation in enumerate([int, None, dict[str, Any], Model, Tree, object, Point | None, NoReturn]):

            def function() -> Any: ...

            function.__annotations__["return"] = annotation
            app.task(name=f"t{number}")(function)
    assert [record.getMessage() for record in caplog.records if record.name == "holdfast.tasks"] == []


async def test_anything_fits_object(app: Holdfast) -> None:
    @app.task
    async def anything(ctx: Context) -> object:
        return [ctx.attempt, {"thread": threading.current_thread() is threading.main_thread()}]

    async with working(app):
        assert await (await anything.submit()).result(60) == [1, {"thread": True}]
