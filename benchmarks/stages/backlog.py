"""Flat cost: the same number of jobs taken from a shallow and from a deep queue must cost the same.

Both queues are on separate servers, so that the shallow one does not share the deep one's memory. At
the end the deep queue on Redis is drained to its last job, and once all has expired Redis must have given
its memory back; what its bounded streams (feed and results) keep is shown apart.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from benchmarks.children import ProbeFailed
from benchmarks.contest import Contestant, Drained, drain, fill
from benchmarks.model import OURS_REDIS, Measure
from benchmarks.stages.stage import Hall, Probe, Stage
from benchmarks.stores import RedisStore, SqliteStore, Store

#: Records and results of finished jobs expire soon, so that the end can be waited for.
_TTL_S: Final = 20
_SETTINGS: Final[dict[str, Any]] = {"finished_ttl_s": _TTL_S, "result_ttl_s": _TTL_S}
_EXPIRED_WITHIN_S: Final = 180.0
#: A queue's own keys, besides its jobs: streams, sets and the like.
_OWN_KEYS: Final = 50
_BOUNDED: Final = ("stream:feed", "stream:result")
_CURVE_POINTS: Final = 100


class Backlog(Stage):
    """Shallow and deep, on both engines."""

    name = "backlog"
    title = "Cost against backlog, 1 worker"

    def __init__(self, hall: Hall) -> None:
        self._hall = hall
        self._deep: list[tuple[Contestant, int]] = []
        self._before = 0
        self.measures = tuple(
            measure for store in ("Redis", "SQLite") for measure in _measures(store, hall.options.shallow)
        )

    def prepare(self) -> None:
        hall, options = self._hall, self._hall.options
        redis = RedisStore(hall.scratch / "deep-redis", options.aof)
        hall.cleanup.callback(redis.close)
        self._before = redis.used_bytes()
        stores: list[tuple[Store, int]] = [
            (redis, options.deep),
            (SqliteStore(hall.scratch / "deep-sqlite"), options.sqlite_deep),
        ]
        for (store, depth), ours in zip(stores, hall.ours, strict=True):
            side = Contestant(ours.name, ours.module, store, hall.scratch, settings=_SETTINGS)
            fill(side, depth)
            self._deep.append((side, depth))

    def probes(self) -> Sequence[Probe]:
        probes, shallow = list[Probe](), self._hall.options.shallow
        for ours, (deep, depth) in zip(self._hall.ours, self._deep, strict=True):
            side = Contestant(ours.name, ours.module, ours.store, ours.scratch, settings=_SETTINGS)
            probes.append(Probe(f"{side.name}, {shallow:,} queued", partial(self._run_shallow, side)))
            probes.append(Probe(f"{side.name}, {depth:,} queued", partial(self._run_deep, deep, depth)))
        return probes

    def finish(self) -> str:
        side, depth = self._deep[0]
        return self._empty(side, depth) + "\n" + self._expire(side)

    def _run_shallow(self, side: Contestant, round_number: int) -> str:
        jobs = self._hall.options.shallow
        side.store.reset()
        fill(side, jobs)
        return self._note(side, jobs, round_number, drain(side, 1, jobs, self._hall.board, limit=jobs))

    def _run_deep(self, side: Contestant, depth: int, round_number: int) -> str:
        jobs = self._hall.options.shallow
        drained = drain(side, 1, jobs, self._hall.board, limit=jobs)
        fill(side, jobs)
        return self._note(side, depth, round_number, drained)

    def _note(self, side: Contestant, depth: int, round_number: int, drained: Drained) -> str:
        store, depth_name = side.store.name, f"{depth:,} queued"
        add = self._hall.results.add
        add(f"backlog.{store}", depth_name, round_number, drained.rate)
        add(f"backlog.{store}.cpu", depth_name, round_number, drained.worker_us)
        if drained.store_cpu_s:
            add(f"backlog.{store}.redis", depth_name, round_number, drained.store_us)
        return str(drained)

    def _empty(self, side: Contestant, depth: int) -> str:
        """The whole deep queue, with its curve."""
        curve, began, step = list[tuple[int, float]](), time.monotonic(), max(1, depth // _CURVE_POINTS)

        def watch(done: int) -> None:
            if not curve or done - curve[-1][0] >= step:
                curve.append((done, time.monotonic() - began))

        self._hall.results.memory |= {"before": self._before, "deep": side.store.used_bytes()}
        drained = drain(side, 1, depth, self._hall.board, watch=watch)
        self._hall.results.curves[OURS_REDIS] = curve
        add = self._hall.results.add
        add("backlog.Redis", f"{depth:,} to the last", 1, drained.rate)
        add("backlog.Redis.cpu", f"{depth:,} to the last", 1, drained.worker_us)
        add("backlog.Redis.redis", f"{depth:,} to the last", 1, drained.store_us)
        return f"all {depth:,} drained at {drained.rate:,.0f} /s"

    def _expire(self, side: Contestant) -> str:
        """Wait until nothing but the queue's own keys is left, then look at the memory."""
        store = side.store
        assert isinstance(store, RedisStore)
        deadline = time.monotonic() + _EXPIRED_WITHIN_S
        while store.keys() > _OWN_KEYS:
            if time.monotonic() > deadline:
                raise ProbeFailed(f"{store.keys():,} keys are left {_EXPIRED_WITHIN_S:.0f} s after the last job")
            time.sleep(0.2)
        with side.producer() as producer:
            producer.call("prune")
        bounded = sum(store.key_bytes(key) for key in _BOUNDED)
        memory = self._hall.results.memory
        memory |= {"expired": store.used_bytes(), "bounded_streams": bounded, "keys": store.keys()}
        over = memory["expired"] - memory["before"]
        return f"Redis holds {over / 1e6:+.1f} MB against an empty one, of that {bounded / 1e6:.1f} MB bounded streams"


def _measures(store: str, jobs: int) -> list[Measure]:
    measures = [
        Measure(f"backlog.{store}", f"{store}: {jobs:,} jobs drained from", "jobs/s", more_is_better=True),
        Measure(f"backlog.{store}.cpu", f"{store}: CPU of the worker", "µs/job", digits=1),
    ]
    if store == "Redis":
        measures.append(Measure(f"backlog.{store}.redis", "Redis: CPU of Redis", "µs/job", digits=1))
    return measures
