"""Print the files that a job passes through, found by running it: `python -m tools.walks [WALK]`.

A file is on a walk if one of its functions is entered, in the thread of the event loop, between the walk's first call
and its end. `tests/docs/test_walks.py` compares the result with `docs/explanation/architecture.md`. Not counted:

- import time: module bodies, and every call that a module body makes;
- building the app, and opening and closing its stores: the same for every job of a process;
- duties that run by a timer and not for a job. Walks in a long-running process are repeated, and a file counts if it is
  entered each time. Upkeep and reclaiming are disabled;
- other threads: the renewer's and the projector's;
- `__init__.py`, and code that dataclasses and msgspec generate;
- fragments that are included in Lua scripts (`_prelude.lua`, `_lanes.lua`). A called script counts as a file.

Without `--redis` and `--ledger`, both servers are started, and stopped at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, redirect_stdout
from pathlib import Path
from types import FrameType
from typing import Any, Final
from unittest import mock

import httpx

import holdfast
from holdfast import Fatal, Holdfast, Worker
from holdfast.cli.main import main as run_command
from holdfast.cli.session import EngineTarget
from holdfast.core.principal import Principal, Role
from holdfast.engine.redis.net.script import Script
from holdfast.http import create_api
from holdfast.http.server import HttpServer, bind
from holdfast.ledger.migrate import migration_store, up
from holdfast.verification.chaos.servers import PostgresServer, RedisServer, find_postgres, find_redis

PACKAGE: Final = Path(holdfast.__file__).parent
PAGE: Final = Path(__file__).resolve().parent.parent / "docs" / "explanation" / "architecture.md"

#: Repetitions of a walk in a process that also does other work.
_ROUNDS: Final = 5
_TIMEOUT_S: Final = 30.0

_WALK: Final = re.compile(r"<!-- walk: (\w+) -->\n(.*?)<!-- end -->", re.DOTALL)
_ROW: Final = re.compile(r"^\| `([^`]+)` \| (.*) \|$", re.MULTILINE)


def walks_on_page(page: str) -> dict[str, dict[str, str]]:
    """The walks of a page: name → file → what happens there."""
    return {name: dict(_ROW.findall(table)) for name, table in _WALK.findall(page)}


class Tracer:
    """Collects files in the order in which they are first entered. Used as a profile function."""

    def __init__(self) -> None:
        self.files: dict[str, None] = {}
        self._prefix = f"{PACKAGE}{os.sep}"
        self._importing = 0
        self._paused = 0

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if code.co_name == "<module>":
            self._importing += (event == "call") - (event == "return")
        elif event == "call" and not self._importing and code.co_filename.startswith(self._prefix):
            self._enter(code.co_filename.removeprefix(self._prefix), frame)

    def _enter(self, file: str, frame: FrameType) -> None:
        if not file.endswith("__init__.py"):
            self.files[file] = None
        if file == "engine/redis/net/client.py" and isinstance(script := frame.f_locals.get("script"), Script):
            self.files[f"engine/redis/lua/{script.name}.lua"] = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Trace during the block."""
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not trace during the block."""
        self._paused += 1
        sys.setprofile(None)
        try:
            yield
        finally:
            self._paused -= 1
            if not self._paused:
                sys.setprofile(self)


# The walks -----------------------------------------------------------------------------------------------------------


async def walk_run(redis_url: str, ledger_url: str) -> list[str]:
    """Submit → run → settle: from the call of `task.submit` until the worker has the settle result."""
    app = _app(redis_url, ledger_url)
    async with app, _working(app):
        add, counts = app.tasks["add"], app.engine.counters

        async def work() -> None:
            done = counts.succeeded + 1
            await add.submit(1, 2)
            while counts.succeeded < done:  # noqa: ASYNC110 - a wait by holdfast would be traced
                await asyncio.sleep(0.001)

        return await _common(work)


async def walk_http(redis_url: str, ledger_url: str) -> list[str]:
    """An HTTP submission: from the request to the response, with a token that was verified before."""
    app = _app(redis_url, ledger_url)
    api = create_api(app, upkeep=False)
    server = HttpServer(api, bind("127.0.0.1", 0))
    serving = asyncio.create_task(server.run_until_stopped())
    await _until(lambda: server.started or serving.done())
    admin = Principal(name="admin", role=Role.ADMIN, tenants=frozenset({"*"}))
    tokens = api.state.service.operations.tokens
    _, token = await tokens.create(admin, name="walks", role=Role.OPERATOR, tenants=["default"])
    headers = {"authorization": f"Bearer {token}"}
    async with httpx.AsyncClient(base_url=server.address, headers=headers, trust_env=False) as client:

        async def work() -> None:
            response = await client.post("/api/v1/jobs", json={"task": "add", "payload": {"a": 1, "b": 2}})
            assert response.is_success, response.text

        files = await _common(work)
    server.stop()
    await serving
    return files


def walk_replay(redis_url: str, ledger_url: str) -> list[str]:
    """`holdfast dlq replay ID`: from `main` to its return, without building the app and opening its stores."""
    asyncio.run(_make_dead_letter(redis_url, ledger_url))
    os.environ |= {"HOLDFAST_URL": redis_url, "HOLDFAST_LEDGER": ledger_url, "HOLDFAST_NAMESPACE": _NAMESPACE}
    dead_letter = json.loads(_command("dlq", "list", "--json"))[0]
    tracer = Tracer()
    with ExitStack() as patches:
        patches.enter_context(_untraced(EngineTarget, "some_app", tracer))
        for name in ("open", "close"):
            patches.enter_context(_untraced_async(Holdfast, name, tracer))
        with tracer.running():
            _command("dlq", "replay", dead_letter["dlq_id"], "--reason", "fixed")
    return list(tracer.files)


WALKS: Final[Mapping[str, Callable[[str, str], list[str] | Coroutine[Any, Any, list[str]]]]] = {
    "run": walk_run,
    "http": walk_http,
    "replay": walk_replay,
}


def trace(walk: str, redis_url: str, ledger_url: str) -> list[str]:
    """The files of a walk, in the order in which they are first entered."""
    found = WALKS[walk](redis_url, ledger_url)
    return asyncio.run(found) if asyncio.iscoroutine(found) else list(found)


# Their parts ---------------------------------------------------------------------------------------------------------

_NAMESPACE: Final = "walks"


def _app(redis_url: str, ledger_url: str) -> Holdfast:
    app = Holdfast(redis_url, ledger=ledger_url, namespace=_NAMESPACE, reclaim=False, reconcile_interval_s=0)

    @app.task
    async def add(a: int, b: int) -> int:
        return a + b

    @app.task
    async def fail() -> None:
        raise Fatal("as intended")

    return app


async def _common(work: Callable[[], Coroutine[Any, Any, None]]) -> list[str]:
    """The files that are entered in every round. The first call is not traced: it opens connections."""
    rounds: list[dict[str, None]] = []
    await work()
    for _ in range(_ROUNDS):
        # Replies and loops of the round before have ended.
        await asyncio.sleep(0.3)
        tracer = Tracer()
        with tracer.running():
            await work()
        rounds.append(tracer.files)
    return [file for file in rounds[0] if all(file in others for others in rounds)]


@asynccontextmanager
async def _working(app: Holdfast, *, upkeep: bool = False) -> AsyncIterator[None]:
    worker = Worker(app, upkeep=upkeep)
    running = asyncio.create_task(worker.run())
    await _until(lambda: worker.ready or running.done())
    try:
        yield
    finally:
        worker.drain()
        await running


async def _make_dead_letter(redis_url: str, ledger_url: str) -> None:
    app = _app(redis_url, ledger_url)
    async with app, _working(app, upkeep=True):
        await app.tasks["fail"].submit()
        async with asyncio.timeout(_TIMEOUT_S):
            while not (await app.ledger.queries.dead_letters(None)).dead_letters:  # noqa: ASYNC110 - polls the ledger
                await asyncio.sleep(0.05)


def _command(*arguments: str) -> str:
    """Run the command line in this process, and return what it prints."""
    printed = io.StringIO()
    with redirect_stdout(printed), mock.patch.object(sys, "argv", ["holdfast", *arguments]):
        try:
            run_command()
        except SystemExit as exc:
            assert not exc.code, f"holdfast {' '.join(arguments)} failed: {exc.code}"  # noqa: PT017 - not a test
    return printed.getvalue()


@contextmanager
def _untraced(owner: type, name: str, tracer: Tracer) -> Iterator[None]:
    original = getattr(owner, name)

    def call(*arguments: Any) -> Any:
        with tracer.paused():
            return original(*arguments)

    with mock.patch.object(owner, name, call):
        yield


@contextmanager
def _untraced_async(owner: type, name: str, tracer: Tracer) -> Iterator[None]:
    original = getattr(owner, name)

    async def call(*arguments: Any) -> Any:
        with tracer.paused():
            return await original(*arguments)

    with mock.patch.object(owner, name, call):
        yield


async def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "not ready in time"
        await asyncio.sleep(0.01)


@contextmanager
def _servers() -> Iterator[tuple[str, str]]:
    """A Redis, and a PostgreSQL with the ledger's tables."""
    with tempfile.TemporaryDirectory() as folder:
        redis = RedisServer(find_redis(), Path(folder))
        postgres = PostgresServer(find_postgres(), fsync=False)
        redis.start()
        try:
            postgres.start()
            asyncio.run(_migrate(postgres.url))
            yield redis.url, postgres.url
        finally:
            postgres.remove()
            redis.stop()


async def _migrate(url: str) -> None:
    store = migration_store(url)
    try:
        await up(store)
    finally:
        await store.close()


def _print(walk: str, files: Sequence[str]) -> None:
    """The walk as the page has it; files that the page does not have are marked."""
    known = walks_on_page(PAGE.read_text(encoding="utf-8")).get(walk, {})
    print(f"{walk}: {len(files)} files, {sum(file.endswith('.lua') for file in files)} of them Lua")
    for file in files:
        print(f"| `{file}` | {known.get(file, '(not on the page)')} |")
    for file in known.keys() - set(files):
        print(f"only on the page: {file}")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Print the files that a job passes through.")
    parser.add_argument("walks", nargs="*", choices=[*WALKS, []], metavar="WALK", help=", ".join(WALKS))
    parser.add_argument("--redis", help="URL of an empty Redis")
    parser.add_argument("--ledger", help="URL of an empty ledger")
    parser.add_argument("--json", action="store_true", help="print a list of files for each walk")
    options = parser.parse_args(arguments)
    with ExitStack() as started:
        urls = (options.redis, options.ledger) if options.redis else started.enter_context(_servers())
        found = {walk: trace(walk, *urls) for walk in options.walks or WALKS}
    if options.json:
        print(json.dumps(found))
    else:
        for walk, files in found.items():
            _print(walk, files)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
