"""Every call to a store fails once before, once after, and once with its reply lost.

python -m tests.crash_points.run --all                      every point of every scenario on every store
python -m tests.crash_points.run sqlite life                one scenario
python -m tests.crash_points.run redis life submit#1:lost   one point
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any, Final

from holdfast import Holdfast
from holdfast.core.history import check_history
from holdfast.core.states import FINAL
from holdfast.ledger.port.ledger import FeedPosition
from holdfast.ledger.verify import verify_ledger
from tests.crash_points.process import Process
from tests.crash_points.scenarios import QUEUE, SCENARIOS, RunRecord, Scenario
from tests.crash_points.seams import Point, Seam, install_seam, select_points
from tests.crash_points.stores import RedisStores, SqliteStores, Stores

_MAX_PROCESSES: Final = 3
_ROUNDS: Final = 12
_ATTEMPTS: Final = 3
_STUCK_S: Final = 30.0
#: Rounded to 0 ms: the tests control time, and a process waits for one interval in real time before it reclaims.
_SETTINGS: Final = {"heartbeat_interval_s": 0.0004}


class NotReached(AssertionError):
    """The call was never made, so nothing was tested."""


def try_point(stores: Stores, scenario: Scenario, point: Point) -> bool:
    """Run with a failure at `point` and return whether it was reached. Retries where runs differ."""
    if _is_steady(stores, scenario):
        run(stores, scenario, point)
        return True
    for _ in range(_ATTEMPTS):
        with suppress(NotReached):
            run(stores, scenario, point)
            return True
    return False


def find_points(stores: Stores, scenario: Scenario) -> list[Point]:
    """Find the points of a run without a failure. Where runs differ, only those that a second run has too."""
    calls = run(stores, scenario).calls
    if not _is_steady(stores, scenario):
        agreed = Counter(call.name for call in run(stores, scenario).calls)
        calls = [call for call in calls if call.number <= agreed[call.name]]
    return select_points(calls)


def _is_steady(stores: Stores, scenario: Scenario) -> bool:
    """Whether every run makes the same calls. A projector's calls depend on the clock."""
    return not (scenario.waits or stores.separate_ledger)


def run(stores: Stores, scenario: Scenario, point: Point | None = None) -> Seam:
    """Run the scenario with a failure at `point`, drive all jobs to their end, and check the result.

    Raises `AssertionError` if an invariant does not hold.
    """
    seam, record = Seam(point), RunRecord()
    with install_seam(seam):
        seam.disabled = True
        asyncio.run(stores.begin())
        try:
            for number in range(1, _MAX_PROCESSES + 1):
                seam.disabled = False
                with asyncio.Runner() as runner:
                    if runner.run(_run_process(seam, stores, scenario, record, number)):
                        break
        finally:
            seam.disabled, seam.crashed = True, False
            asyncio.run(stores.end())
    if point is not None and not seam.fired:
        raise NotReached(f"{point} was never reached")
    return seam


async def _run_process(seam: Seam, stores: Stores, scenario: Scenario, record: RunRecord, number: int) -> bool:
    """Run one process until the scenario ends or the process crashes. Return whether the scenario ended."""
    crashed, loop = asyncio.Event(), asyncio.get_running_loop()
    seam.restart(lambda: loop.call_soon_threadsafe(crashed.set))
    app = Holdfast(clock=stores.clock, **(stores.settings | _SETTINGS | scenario.settings))
    scenario.tasks(app, record)
    process = Process(stores, app, number, scenario.specs(app, record))
    scenario_task, crash_task = (
        asyncio.create_task(_run_scenario(seam, process, scenario, record)),
        asyncio.create_task(crashed.wait()),
    )
    try:
        await asyncio.wait({scenario_task, crash_task}, timeout=_STUCK_S, return_when=asyncio.FIRST_COMPLETED)
        if seam.crashed:
            return False
        if not scenario_task.done():
            trace = "".join(
                traceback.format_list([f for s in scenario_task.get_stack() for f in traceback.extract_stack(s)][-3:])
            )
            raise AssertionError(f"stuck in step {record.step} for {_STUCK_S:g} s:\n{trace}")
        scenario_task.result()
        return True
    finally:
        ended = scenario_task.done() and not seam.crashed
        await _end([crash_task] if ended else None)
        await process.close()
        seam.abandon()
        await asyncio.sleep(0)


async def _end(tasks: list[asyncio.Task[Any]] | None) -> None:
    """Cancel these tasks; or all tasks, including those that they start when they are cancelled."""
    this = asyncio.current_task()
    while pending := [task for task in tasks or asyncio.all_tasks() if task is not this and not task.done()]:
        for task in pending:
            task.cancel()
        _, stuck = await asyncio.wait(pending, timeout=_STUCK_S)
        assert not stuck, f"cancelled, but not ended: {stuck}"


async def _run_scenario(seam: Seam, process: Process, scenario: Scenario, record: RunRecord) -> None:
    if process.number > 1:
        # The previous process crashed, and its leases have expired since.
        await process.stores.advance(31_000)
    await process.open()
    steps = scenario.steps()
    while record.step < len(steps):
        await steps[record.step](process, record)
        record.step += 1
    for _ in range(_ROUNDS):
        await process.stores.advance(31_000)
        await process.run_upkeep()
        await process.work()
        await scenario.act_as_operator(process, record)
        await process.work()
        await process.run_upkeep()
        if await _is_idle(seam, process, record):
            break
    seam.disabled = True
    await _check(process, scenario, record)


async def _is_idle(seam: Seam, process: Process, record: RunRecord) -> bool:
    seam.disabled = True
    try:
        engine = process.engine
        for queue in await engine.queues():
            if any((await engine.stats(queue)).states.values()):
                return False
            if process.stores.separate_ledger:
                projection, snapshot = process.ledger.projection, await engine.snapshot(queue, [])
                assert projection is not None
                if await projection.position(queue) != FeedPosition(snapshot.position, snapshot.nonce):
                    return False
                if await projection.unacked_dead_letters(queue, 1):
                    return False
        return True
    finally:
        seam.disabled = False


async def _check(process: Process, scenario: Scenario, record: RunRecord) -> None:
    engine, stores = process.engine, process.stores
    assert record.accepted, "nothing was accepted"
    for key, info in zip(record.accepted, await engine.get(QUEUE, list(record.accepted.values())), strict=True):
        assert info is not None, f"the accepted job {key} is not there"
        assert info.state in FINAL, f"job {key} is {info.state}"
    if stores.has_ledger:
        report = await verify_ledger(process.ledger.queries)
        report.assert_valid(ended=True)
        assert scenario.prunes or report.jobs >= len(record.accepted)
        assert not report.anomalies, f"{report.anomalies} anomalies"
        assert scenario.forks or not report.forks, f"{report.forks} forks"
    else:
        events = [event for entry in await engine.read_feed(QUEUE, "", 1_000) for event in entry.events]
        check_history(events, ended=True)
    for key, times in record.effects.items():
        assert times == 1 or key in scenario.repeated, f"the effect {key} happened {times} times"
    for queue in await engine.queues():
        stats = await engine.stats(queue)
        assert not any(stats.states.values()), f"{queue} still has {stats.states}"
        assert (stats.pending, stats.delayed) == (0, 0), stats
    if process.number == 1 and not scenario.loses_leases:
        # A process that survives recovers its claims at once, not when their leases have expired.
        assert not engine.counters.reclaimed, f"{engine.counters.reclaimed} leases of a surviving process expired"
    leftovers = await stores.leftovers()
    assert not leftovers, leftovers
    await scenario.check(process, record)


# The command ---------------------------------------------------------------------------------------


@contextmanager
def start_stores(folder: Path, names: Sequence[str]) -> Iterator[list[Stores]]:
    """The named stores, on separate servers."""
    from holdfast.verification.chaos.servers import PostgresServer, RedisServer
    from tests.conftest import migrate
    from tests.servers import find_server
    from tools.servers import POSTGRES, REDIS

    makers: dict[str, Callable[[], Stores]] = {"sqlite": lambda: SqliteStores(folder)}
    with ExitStack() as stack:
        if any(name.startswith("redis") for name in names):
            redis = RedisServer(find_server(REDIS), folder / "redis")
            redis.start()
            stack.callback(redis.stop)
            makers["redis"] = lambda: RedisStores(redis.url)
            makers["redis+sqlite"] = lambda: RedisStores(redis.url, sqlite_ledgers(folder), "redis+sqlite")
        if "redis+postgres" in names:
            postgres = PostgresServer(find_server(POSTGRES), {}, fsync=False)
            stack.callback(postgres.remove)
            postgres.start()
            migrate(postgres.url)
            makers["redis+postgres"] = lambda: RedisStores(redis.url, lambda: postgres.url, "redis+postgres")
        yield [makers[name]() for name in names]


def sqlite_ledgers(folder: Path) -> Callable[[], str]:
    """A separate file for every run."""
    count = iter(range(1_000_000))
    return lambda: f"sqlite:///{folder / f'ledger-{next(count)}.db'}"


STORES: Final = ("sqlite", "redis", "redis+postgres", "redis+sqlite")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the points and return how many failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.crash_points.run", description=__doc__.split("\n")[0])
    parser.add_argument("stores", nargs="?", choices=STORES)
    parser.add_argument("scenario", nargs="?", choices=sorted(SCENARIOS))
    parser.add_argument("point", nargs="?", type=Point.parse, help="as it was printed, e.g. submit#1:lost")
    parser.add_argument("--all", action="store_true", help="every point of every scenario on every store")
    parser.add_argument("--part", type=float, default=1.0, help="only this part of the points, by the seed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--list", action="store_true", help="only list the points")
    args = parser.parse_args(arguments)
    if not args.point:
        logging.disable()
    if not args.stores and not args.all:
        parser.error("name a store, or --all")
    names = [args.stores] if args.stores else list(STORES)
    failures = 0
    with tempfile.TemporaryDirectory(prefix="crash-") as folder, start_stores(Path(folder), names) as stores_to_run:
        for stores in stores_to_run:
            for scenario in SCENARIOS.values():
                if scenario.supports(stores) and args.scenario in (None, scenario.name):
                    failures += _run_all(stores, scenario, args)
    return failures


def sample(chosen: Sequence[Point], part: float, seed: int) -> list[Point]:
    """Choose a part of the points; always the same for a seed."""
    return sorted(Random(seed).sample(list(chosen), math.ceil(len(chosen) * part)))


def _run_all(stores: Stores, scenario: Scenario, args: argparse.Namespace) -> int:
    started = time.monotonic()
    only: Point | None = args.point
    chosen = [only] if only else sample(find_points(stores, scenario), args.part, args.seed)
    if args.list:
        sys.stdout.writelines(f"{stores.name} {scenario.name} {point}\n" for point in chosen)
        return 0
    failed = missed = 0
    for point in chosen:
        try:
            missed += not try_point(stores, scenario, point)
        except Exception as exc:  # noqa: BLE001 - printed and counted
            failed += 1
            sys.stdout.write(f"FAILED {stores.name} {scenario.name} '{point}': {type(exc).__name__}: {exc}\n")
            if only:
                traceback.print_exc()
    seconds = time.monotonic() - started
    counted = f"{len(chosen):5} points {failed:4} failed {missed:4} not reached {seconds:6.1f} s"
    sys.stdout.write(f"{stores.name:15} {scenario.name:12} {counted}\n")
    sys.stdout.flush()
    return failed


if __name__ == "__main__":
    sys.exit(min(1, main()))
