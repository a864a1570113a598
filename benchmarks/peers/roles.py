"""What all peers' roles have in common: how they answer, and what their jobs write down.

A process ends at once when its input ends. What it leaves in the store does not matter: the next probe begins with an
empty one.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, BinaryIO, NoReturn

import msgspec

from benchmarks.board import Gauge
from benchmarks.sides import channel
from benchmarks.sides.channel import ARGUMENT, Answer, Handler, Spec, at_low_load, serve, timed
from benchmarks.sides.diary import SLOW_S, Diary
from benchmarks.usage import descendants, resident_bytes

Send = Callable[..., Awaitable[object]]
Role = Callable[[Spec], Any]
#: What a peer's tasks are made of: `noop`, `stamp` and `slow`, to be registered under their own names.
Jobs = tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]


def main(roles: Mapping[str, Role]) -> None:
    """Run the role that the command line names: in an event loop if it is a coroutine, else without one."""
    role = roles[sys.argv[1]]
    if inspect.iscoroutinefunction(role):
        channel.main({sys.argv[1]: role})
    else:
        role(msgspec.json.decode(sys.argv[2], type=Spec))


def is_tuned(spec: Spec) -> bool:
    """Whether the settings for crashes are asked for, and not the defaults."""
    return bool(spec.settings.get("tuned"))


class Record:
    """What the jobs of one process write down; by threads of it, too."""

    def __init__(self, spec: Spec) -> None:
        self._gauge = Gauge(spec.board_path, spec.row) if spec.board else None
        self._diary = Diary(spec.settings["log"]) if "log" in spec.settings else None
        self._late_ns: list[int] = []
        self._counting = threading.Lock()

    def count(self) -> None:
        """A no-op was executed."""
        assert self._gauge is not None
        self._gauge.tick()

    def count_in_threads(self) -> None:
        """The same where several threads execute."""
        with self._counting:
            self.count()

    def stamp(self, sent_ns: int) -> None:
        """A job that was sent at that instant has started."""
        self._late_ns.append(time.monotonic_ns() - sent_ns)

    async def slow(self, number: int) -> None:
        """A slow job that waits in the event loop."""
        assert self._diary is not None
        self._diary.began(number)
        await asyncio.sleep(SLOW_S)
        self._diary.ended(number)

    def slow_in_thread(self, number: int) -> None:
        """A slow job that holds its thread."""
        assert self._diary is not None
        self._diary.began(number)
        time.sleep(SLOW_S)
        self._diary.ended(number)

    def report(self) -> Answer:
        """What was used since the first execution."""
        assert self._gauge is not None
        return {"cpu_s": self._gauge.cpu_s, "rss": resident_bytes()}

    def latencies(self) -> Answer:
        """Of the jobs since the last request."""
        late_ns, self._late_ns = self._late_ns, []
        return {"late_ns": late_ns}


def jobs_in_loop(record: Record | None) -> Jobs:
    """The three jobs as coroutines. Without a record they are only to be known by name: who submits runs none."""

    async def noop(argument: dict[str, Any]) -> None:
        if record is not None:
            record.count()

    async def stamp(sent_ns: int) -> None:
        if record is not None:
            record.stamp(sent_ns)

    async def slow(number: int) -> None:
        if record is not None:
            await record.slow(number)

    return noop, stamp, slow


def jobs_in_threads(record: Record | None) -> Jobs:
    """The same as functions that block, in one thread or several."""

    def noop(argument: dict[str, Any]) -> None:
        if record is not None:
            record.count_in_threads()

    def stamp(sent_ns: int) -> None:
        if record is not None:
            record.stamp(sent_ns)

    def slow(number: int) -> None:
        if record is not None:
            record.slow_in_thread(number)

    return noop, stamp, slow


def parts(jobs: int, size: int) -> Iterator[int]:
    """Split a number of jobs into calls of this size."""
    for start in range(0, jobs, size):
        yield min(size, jobs - start)


async def produce_by(
    *,
    noop: Send,
    stamp: Send,
    slow: Send,
    bulk: Callable[[int], Awaitable[object]] | None = None,
    install: Callable[[], Awaitable[object]] | None = None,
) -> NoReturn:
    """The role of a submitting process. Without a way for many, they go one by one."""

    async def one_by_one(jobs: int) -> None:
        for _ in range(jobs):
            await noop(ARGUMENT)

    async def answer_install() -> Answer:
        if install is not None:
            await install()
        return {}

    async def answer_single(jobs: int) -> Answer:
        with timed(jobs) as answer:
            await one_by_one(jobs)
        return answer

    async def answer_bulk(jobs: int) -> Answer:
        with timed(jobs) as answer:
            await (bulk or one_by_one)(jobs)
        return answer

    async def answer_paced(jobs: int) -> Answer:
        await at_low_load(jobs, stamp)
        return {}

    async def answer_slow(jobs: int) -> Answer:
        for number in range(jobs):
            await slow(number)
        return {}

    handlers: dict[str, Handler] = {
        "install": answer_install,
        "single": answer_single,
        "bulk": answer_bulk,
        "paced": answer_paced,
        "slow": answer_slow,
    }
    await serve(handlers)
    _end(0)


def blocking(call: Callable[..., object]) -> Send:
    """Make a blocking call awaitable; these processes run nothing else meanwhile."""

    async def awaited(*arguments: Any) -> None:
        call(*arguments)

    return awaited


async def work_in_loop(record: Record, run: Callable[[], Awaitable[object]]) -> NoReturn:
    """The role of a worker process whose worker is a coroutine."""
    running: list[asyncio.Task[None]] = []

    async def begin(limit: int | None = None) -> Answer:
        running.append(asyncio.create_task(_to_its_end(run)))
        return {}

    async def report() -> Answer:
        return record.report()

    async def latencies() -> Answer:
        return record.latencies()

    await serve({"start": begin, "listen": begin, "report": report, "latencies": latencies})
    _end(0)


def work_blocking(record: Record, run: Callable[[], object]) -> NoReturn:
    """The role of a blocking worker: it has the main thread, for its signals; another thread reads requests."""
    begun = threading.Event()
    # Some greet on the standard output, which is our line to the parent.
    line = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def begin(limit: int | None = None) -> Answer:
        begun.set()
        return {}

    handlers = {"start": begin, "listen": begin, "report": record.report, "latencies": record.latencies}
    threading.Thread(target=_listen, args=(handlers, line), daemon=True).start()
    begun.wait()
    try:
        run()
        print("the worker ended by itself", file=sys.stderr)
    except BaseException:  # noqa: BLE001 - whatever it was, the process ends with it
        traceback.print_exc()
    _end(1)


async def _to_its_end(run: Callable[[], Awaitable[object]]) -> None:
    """A worker that ends before its time ends the process: the parent sees why in its log."""
    try:
        await run()
        print("the worker ended by itself", file=sys.stderr)
    except BaseException:  # noqa: BLE001 - whatever it was, the process ends with it
        traceback.print_exc()
    _end(1)


def _listen(handlers: Mapping[str, Callable[..., Answer]], line: BinaryIO) -> None:
    def say(answer: Answer) -> None:
        line.write(msgspec.json.encode(answer) + b"\n")
        line.flush()

    say({})
    # Unbuffered: a worker that forks would inherit the lock of a buffer that this thread is reading, and wait for ever.
    with open(os.dup(0), "rb", buffering=0) as requests:
        for request in requests:
            request = msgspec.json.decode(request)
            say(handlers[request.pop("do")](**request))
    _end(0)


def _end(code: int) -> NoReturn:
    for pid in descendants(os.getpid()):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    sys.stderr.flush()
    os._exit(code)
