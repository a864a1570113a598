"""Every call to a store fails once before, once after, and once with its reply lost.

python -m tests.crash_points.run --all                      every point of every story on every store
python -m tests.crash_points.run sqlite life                one story
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
from tests.crash_points.scenarios import QUEUE, STORIES, Story, World
from tests.crash_points.seams import Point, Seam, installed, points_of
from tests.crash_points.stores import Place, RedisPlace, SqlitePlace

_MOST_PROCESSES: Final = 3
_ROUNDS: Final = 12
_TRIES: Final = 3
_STUCK_S: Final = 30.0


class NotReached(AssertionError):
    """The call was never made: then nothing was tried."""


def try_point(place: Place, story: Story, point: Point) -> bool:
    """`run`; whether the point was reached, which may need more than one try where runs differ."""
    if _is_steady(place, story):
        run(place, story, point)
        return True
    for _ in range(_TRIES):
        with suppress(NotReached):
            run(place, story, point)
            return True
    return False


def points(place: Place, story: Story) -> list[Point]:
    """All of a run without a failure; where runs differ, those that a second one has, too."""
    calls = run(place, story).calls
    if not _is_steady(place, story):
        agreed = Counter(call.name for call in run(place, story).calls)
        calls = [call for call in calls if call.number <= agreed[call.name]]
    return points_of(calls)


def _is_steady(place: Place, story: Story) -> bool:
    """Whether every run makes the same calls. A projector beside the engine goes by the clock, too."""
    return not (story.waits or place.apart)


def run(place: Place, story: Story, point: Point | None = None) -> Seam:
    """The story, with a failure at that point; then everything comes to its end, and is looked at.

    Raises `AssertionError` if something is not as it must be.
    """
    seam, world = Seam(point), World()
    with installed(seam):
        seam.off = True
        asyncio.run(place.begin())
        try:
            for number in range(1, _MOST_PROCESSES + 1):
                seam.off = False
                with asyncio.Runner() as runner:
                    if runner.run(_live(seam, place, story, world, number)):
                        break
        finally:
            seam.off, seam.dead = True, False
            asyncio.run(place.end())
    if point is not None and not seam.fired:
        raise NotReached(f"{point} was never reached")
    return seam


async def _live(seam: Seam, place: Place, story: Story, world: World, number: int) -> bool:
    """One process, to the end of the story or to its own; whether it was the story's."""
    dead, loop = asyncio.Event(), asyncio.get_running_loop()
    seam.reborn(lambda: loop.call_soon_threadsafe(dead.set))
    app = Holdfast(clock=place.clock, **(place.settings | story.settings))
    story.tasks(app, world)
    process = Process(place, app, number, story.plans(app, world))
    playing, dying = asyncio.create_task(_play(seam, process, story, world)), asyncio.create_task(dead.wait())
    try:
        await asyncio.wait({playing, dying}, timeout=_STUCK_S, return_when=asyncio.FIRST_COMPLETED)
        if seam.dead:
            return False
        if not playing.done():
            where = "".join(
                traceback.format_list([f for s in playing.get_stack() for f in traceback.extract_stack(s)][-3:])
            )
            raise AssertionError(f"stuck in step {world.step} for {_STUCK_S:g} s:\n{where}")
        playing.result()
        return True
    finally:
        ended = playing.done() and not seam.dead
        await _end([dying] if ended else None)
        await process.close()
        seam.abandon()
        await asyncio.sleep(0)


async def _end(tasks: list[asyncio.Task[Any]] | None) -> None:
    """Cancel these; or all that there are, and whatever they begin when they are cancelled."""
    this = asyncio.current_task()
    while left := [task for task in tasks or asyncio.all_tasks() if task is not this and not task.done()]:
        for task in left:
            task.cancel()
        _, stuck = await asyncio.wait(left, timeout=_STUCK_S)
        assert not stuck, f"cancelled, and not ended: {stuck}"


async def _play(seam: Seam, process: Process, story: Story, world: World) -> None:
    if process.number > 1:
        # The one before was dead for longer than its leases last.
        await process.place.advance(31_000)
    await process.open()
    steps = story.steps()
    while world.step < len(steps):
        await steps[world.step](process, world)
        world.step += 1
    for _ in range(_ROUNDS):
        await process.place.advance(31_000)
        await process.keep()
        await process.work()
        await story.attend(process, world)
        await process.work()
        await process.keep()
        if await _is_quiet(seam, process, world):
            break
    seam.off = True
    await _check(process, story, world)


async def _is_quiet(seam: Seam, process: Process, world: World) -> bool:
    seam.off = True
    try:
        engine = process.engine
        for queue in await engine.queues():
            if any((await engine.stats(queue)).states.values()):
                return False
            if process.place.apart:
                projection, cut = process.ledger.projection, await engine.snapshot(queue, [])
                assert projection is not None
                if await projection.position(queue) != FeedPosition(cut.position, cut.nonce):
                    return False
                if await projection.unacked_dead_letters(queue, 1):
                    return False
        return True
    finally:
        seam.off = False


async def _check(process: Process, story: Story, world: World) -> None:
    engine, place = process.engine, process.place
    assert world.accepted, "nothing was accepted"
    for key, view in zip(world.accepted, await engine.get(QUEUE, list(world.accepted.values())), strict=True):
        assert view is not None, f"the accepted job {key} is not there"
        assert view.state in FINAL, f"job {key} is {view.state}"
    if place.has_ledger:
        report = await verify_ledger(process.ledger.queries)
        report.assert_valid(ended=True)
        assert story.forgets or report.jobs >= len(world.accepted)
        assert not report.anomalies, f"{report.anomalies} anomalies"
        assert story.forks or not report.forks, f"{report.forks} forks"
    else:
        events = [event for entry in await engine.read_feed(QUEUE, "", 1_000) for event in entry.events]
        check_history(events, ended=True)
    for key, times in world.acted.items():
        assert times == 1 or key in story.repeated, f"the effect {key} happened {times} times"
    for queue in await engine.queues():
        stats = await engine.stats(queue)
        assert not any(stats.states.values()), f"{queue} still has {stats.states}"
        assert (stats.pending, stats.delayed) == (0, 0), stats
    if process.number == 1 and not story.loses_leases:
        # Who lives on finds what it holds at once, and not when the lease has run out.
        assert not engine.counters.reclaimed, f"{engine.counters.reclaimed} leases of a living process ran out"
    left = await place.leftovers()
    assert not left, left
    await story.check(process, world)


# The command ---------------------------------------------------------------------------------------


@contextmanager
def all_places(folder: Path, names: Sequence[str]) -> Iterator[list[Place]]:
    """Those that are wanted, on servers of their own."""
    from holdfast.verification.chaos.servers import PostgresServer, RedisServer
    from tests.conftest import migrate
    from tests.servers import find_server
    from tools.servers import POSTGRES, REDIS

    made: dict[str, Callable[[], Place]] = {"sqlite": lambda: SqlitePlace(folder)}
    with ExitStack() as stack:
        if any(name.startswith("redis") for name in names):
            redis = RedisServer(find_server(REDIS), folder / "redis")
            redis.start()
            stack.callback(redis.stop)
            made["redis"] = lambda: RedisPlace(redis.url)
            made["redis+sqlite"] = lambda: RedisPlace(redis.url, sqlite_ledgers(folder), "redis+sqlite")
        if "redis+postgres" in names:
            postgres = PostgresServer(find_server(POSTGRES), {}, fsync=False)
            stack.callback(postgres.remove)
            postgres.start()
            migrate(postgres.url)
            made["redis+postgres"] = lambda: RedisPlace(redis.url, lambda: postgres.url, "redis+postgres")
        yield [made[name]() for name in names]


def sqlite_ledgers(folder: Path) -> Callable[[], str]:
    """A file of its own for every run."""
    count = iter(range(1_000_000))
    return lambda: f"sqlite:///{folder / f'ledger-{next(count)}.db'}"


PLACES: Final = ("sqlite", "redis", "redis+postgres", "redis+sqlite")


def main(arguments: Sequence[str] | None = None) -> int:
    """How many points failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.crash_points.run", description=__doc__.split("\n")[0])
    parser.add_argument("place", nargs="?", choices=PLACES)
    parser.add_argument("story", nargs="?", choices=sorted(STORIES))
    parser.add_argument("point", nargs="?", type=Point.parse, help="as it was printed, e.g. submit#1:lost")
    parser.add_argument("--all", action="store_true", help="every point of every story on every store")
    parser.add_argument("--part", type=float, default=1.0, help="only this part of the points, by the seed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--list", action="store_true", help="only say which there are")
    given = parser.parse_args(arguments)
    if not given.point:
        logging.disable()
    if not given.place and not given.all:
        parser.error("name a store, or --all")
    names = [given.place] if given.place else list(PLACES)
    failures = 0
    with tempfile.TemporaryDirectory(prefix="crash-") as folder, all_places(Path(folder), names) as places:
        for place in places:
            for story in STORIES.values():
                if story.suits(place) and given.story in (None, story.name):
                    failures += _run_all(place, story, given)
    return failures


def sample(chosen: Sequence[Point], part: float, seed: int) -> list[Point]:
    """Some of them: always the same for a seed."""
    return sorted(Random(seed).sample(list(chosen), math.ceil(len(chosen) * part)))


def _run_all(place: Place, story: Story, given: argparse.Namespace) -> int:
    began = time.monotonic()
    only: Point | None = given.point
    chosen = [only] if only else sample(points(place, story), given.part, given.seed)
    if given.list:
        sys.stdout.writelines(f"{place.name} {story.name} {point}\n" for point in chosen)
        return 0
    failed = missed = 0
    for point in chosen:
        try:
            missed += not try_point(place, story, point)
        except Exception as exc:  # noqa: BLE001 - told, and counted
            failed += 1
            sys.stdout.write(f"FAILED {place.name} {story.name} '{point}': {type(exc).__name__}: {exc}\n")
            if only:
                traceback.print_exc()
    seconds = time.monotonic() - began
    counted = f"{len(chosen):5} points {failed:4} failed {missed:4} not reached {seconds:6.1f} s"
    sys.stdout.write(f"{place.name:15} {story.name:8} {counted}\n")
    sys.stdout.flush()
    return failed


if __name__ == "__main__":
    sys.exit(min(1, main()))
