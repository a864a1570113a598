"""Registering tasks, and invalid registrations."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from holdfast import Context, Holdfast, Retry, Settings
from holdfast.core.verdict import OnExhausted
from holdfast.errors import DuplicateTask, InvalidOption
from holdfast.execution.spec import ExecutionMode


@pytest.fixture
def app() -> Holdfast:
    return Holdfast("sqlite://")


def test_the_execution_mode_follows_the_function(app: Holdfast) -> None:
    async def on_loop() -> None: ...

    def in_thread() -> None: ...

    assert app.task(on_loop).spec.mode is ExecutionMode.LOOP
    assert app.task(in_thread).spec.mode is ExecutionMode.THREAD
    assert app.task(name="p", process=True)(in_thread).spec.mode is ExecutionMode.PROCESS
    assert app.task(name="lambda")(lambda: None).spec.mode is ExecutionMode.THREAD


def test_a_task_has_its_policy(app: Holdfast) -> None:
    @app.task(
        retry=Retry(max_retries=9),
        timeout=1.5,
        on_exhausted="suspend",
        retry_on=OSError,
        fatal_on=(KeyError, ValueError),
        unavailable_on=(ConnectionError,),
    )
    async def work(ctx: Context, number: int) -> None: ...

    policy = work.spec.policy
    assert (policy.retry.max_retries, policy.timeout_ms, policy.on_exhausted) == (9, 1_500, OnExhausted.SUSPEND)
    assert policy.retry_on == (OSError,)
    assert policy.fatal_on == (KeyError, ValueError)
    assert policy.unavailable_on == (ConnectionError,)
    assert work.spec.context_name == "ctx"


async def work() -> None: ...


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": ""}, "a task's name must be a non-empty name"),
        ({"name": "a b"}, "must not contain spaces"),
        ({"queue": ""}, "queue must be a non-empty name"),
        ({"retry": 3}, "retry must be a Retry"),
        ({"timeout": 0}, "timeout must be more than 0"),
        ({"timeout": -1}, "timeout must not be negative"),
        ({"on_exhausted": "drop"}, "dead_letter or suspend"),
        ({"retry_on": ["x"]}, "retry_on takes an exception type or a tuple of them"),
        ({"fatal_on": (1,)}, "fatal_on takes an exception type or a tuple of them"),
        ({"unavailable_on": "x"}, "unavailable_on takes an exception type or a tuple of them"),
        ({"priority": "urgent"}, "priority must be one of"),
    ],
    ids=str,
)
def test_invalid_options_are_named(app: Holdfast, options: Any, message: str) -> None:
    with pytest.raises(InvalidOption, match=message):
        app.task(**options)(work)
    assert not app.tasks


def test_objects_that_cannot_be_a_task_are_refused(app: Holdfast) -> None:
    def generate() -> Any:
        yield 1

    def rest(*numbers: int) -> None: ...

    anything: Any = app.task
    for function, message in (
        (generate, "is a generator"),
        (rest, "no name on the wire"),
        (7, "decorates a function"),
        (functools.partial(work), "decorates a function"),
        (lambda: None, "a lambda has no name"),
    ):
        with pytest.raises(InvalidOption, match=message):
            anything(function)


def test_two_tasks_of_one_name_are_refused(app: Holdfast) -> None:
    app.task(work)
    with pytest.raises(DuplicateTask, match=r"rename one with @app.task\(name=…\)"):
        app.task(work)
    app.task(name="other")(work)
    assert set(app.tasks) == {"work", "other"}


async def test_one_key_for_many_jobs_is_refused(app: Holdfast) -> None:
    with pytest.raises(InvalidOption, match="one idempotency_key cannot serve many jobs"):
        await app.task(work).options(idempotency_key="k").submit_many([()])
    # Nor can one call's own connection, or another task's call.
    task = app.tasks["work"]
    with pytest.raises(InvalidOption, match="one connection"):
        await task.submit_many([task.options(connection=object()).bind()])
    with pytest.raises(InvalidOption, match="a call of task 'other' cannot be submitted with those of 'work'"):
        await task.submit_many([app.task(name="other")(work).bind()])


def test_a_task_without_a_policy_uses_the_apps() -> None:
    app = Holdfast("sqlite://", retry=Retry(max_retries=7))
    assert app.task(name="plain")(lambda: None).spec.policy.retry.max_retries == 7
    assert app.task(name="own", retry=Retry(max_retries=1))(lambda: None).spec.policy.retry.max_retries == 1
    with pytest.raises(InvalidOption, match="retry"):
        Holdfast("sqlite://", retry=3)  # type: ignore[arg-type]


def test_an_engine_waits_only_for_a_separate_ledger() -> None:
    """Embedded, the engine records dead letters itself."""
    url = "sqlite:///jobs.db"
    ledgers = [None, url, "sqlite:///./jobs.db", "sqlite:///ledger.db", "postgresql://localhost/ledger"]
    assert [Holdfast(url, ledger=ledger).engine.options.ledger for ledger in ledgers] == [False] * 3 + [True] * 2


def test_settings_are_given_once(app: Holdfast) -> None:
    settings = Settings.load(url="sqlite://", concurrency=7)
    assert Holdfast(settings=settings).settings is settings
    assert Holdfast("sqlite://", concurrency=7).settings.concurrency == 7
    with pytest.raises(InvalidOption, match="not both"):
        Holdfast("sqlite://", settings=settings)
    with pytest.raises(InvalidOption, match="url"):
        Holdfast("mongodb://")


async def test_settings_change_only_while_the_app_is_not_open(app: Holdfast) -> None:
    app.configure(concurrency=3)
    assert (app.settings.concurrency, app.settings.url) == (3, "sqlite://")
    async with app:
        with pytest.raises(InvalidOption, match=r"this app is open; .* after `await app.close\(\)`"):
            app.configure(concurrency=4)
    app.configure(concurrency=5)
    assert app.settings.concurrency == 5


def test_an_engine_can_be_built_without_a_loop(app: Holdfast) -> None:
    assert app.engine is app.engine
