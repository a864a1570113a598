"""The child's side of `process=True`, without a process: finding tasks, running commands, replying."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from holdfast import Holdfast, Retry
from holdfast.core.job import Claim, Failure, Lease, Meta
from holdfast.core.verdict import Deferred, FailureKind, Raised, Returned
from holdfast.errors import InvalidOption
from holdfast.execution import child_processes
from holdfast.execution.child_processes import RunCommand, RunReply
from holdfast.execution.spec import TaskLocation, find_task, load_task, locate
from tests.execution import process_tasks

META = Meta(retry_count=1, retry=Retry(max_retries=2), context={"a": [1]})
CLAIM = Claim(Lease("q", "j", "1-0", 1, "w"), "pid", b'{"word": "x"}', "default", "", "", 2, 1, 2, META)


def test_commands_and_replies_survive_a_round_trip() -> None:
    for context in ({"a": [1]}, {"more than 64 bits": [10**30, -(10**400)]}):
        claim = msgspec.structs.replace(CLAIM, meta=msgspec.structs.replace(META, context=context))
        packed = msgspec.msgpack.encode(RunCommand.of(TaskLocation("m", "f", "t"), claim))
        assert msgspec.msgpack.decode(packed, type=RunCommand).whole_claim() == claim
    for outcome in (Returned(b"1"), Raised(FailureKind.FATAL, Failure("CODE", "message"))):
        packed = msgspec.msgpack.encode(RunReply.from_outcome(outcome))
        assert msgspec.msgpack.decode(packed, type=RunReply).outcome() == outcome
    with pytest.raises(TypeError):
        RunReply.from_outcome(Deferred("no"))


def test_a_task_is_found_where_it_is_defined() -> None:
    location = locate(process_tasks.pid.spec)
    assert (location.module, location.task) == ("tests.execution.process_tasks", "pid")
    assert load_task(location) is process_tasks.pid.spec
    with pytest.raises(InvalidOption, match="no task 'unknown'"):
        load_task(TaskLocation(location.module, location.file, "unknown"))


def test_a_task_is_found_through_its_app() -> None:
    module: Any = ModuleType("somewhere")
    module.application = Holdfast("sqlite://")
    module.number = 7

    @module.application.task
    def hidden() -> None: ...

    assert find_task(module, "hidden") is hidden.spec
    assert find_task(module, "unknown") is None


def test_a_script_is_loaded_from_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from holdfast import Holdfast\n"
        "app = Holdfast('sqlite://')\n"
        "@app.task(process=True)\n"
        "def work() -> str:\n"
        "    return __name__\n"
        "assert __name__ != '__main__'\n"
    )
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.delitem(sys.modules, "__mp_main__", raising=False)
    spec = load_task(TaskLocation("", str(script), "work"))
    assert spec.function() == "__mp_main__"
    assert load_task(TaskLocation("", str(script), "work")) is spec
    monkeypatch.delitem(sys.modules, "__mp_main__")
    with pytest.raises(InvalidOption, match="no file"):
        load_task(TaskLocation("", str(tmp_path / "no_suffix"), "work"))


def test_commands_are_run(capfd: pytest.CaptureFixture[str]) -> None:
    with asyncio.Runner() as runner:
        outcome = child_processes._run(process_tasks.pid.spec, CLAIM, runner)
        assert isinstance(outcome, Returned)
        assert msgspec.json.decode(outcome.result)[1:] == ["x", "j"]
        nap = msgspec.structs.replace(CLAIM, task="nap", payload=b"[0]")
        assert isinstance(child_processes._run(process_tasks.nap.spec, nap, runner), Returned)


def test_a_failed_import_is_retryable() -> None:
    loaded = child_processes._load(TaskLocation("holdfast.nowhere", "", "work"))
    assert isinstance(loaded, Raised)
    assert (loaded.kind, loaded.failure.type) == (FailureKind.RETRYABLE, "ModuleNotFoundError")
    assert child_processes._load(locate(process_tasks.pid.spec)) is process_tasks.pid.spec
