"""When a process may reclaim after an interruption."""

from __future__ import annotations

from holdfast.core.job import Lease
from holdfast.engine.outage_watch import OutageWatch


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_process_waits_at_its_start_and_after_each_interruption() -> None:
    clock = Clock()
    watch = OutageWatch(10.0, clock)
    for contact in ("first", "second"):
        assert watch.must_wait("orders", contact)
        clock.now += 9.9
        assert watch.must_wait("orders", contact)
        clock.now += 0.1
        assert not watch.must_wait("orders", contact)


def test_queues_wait_separately() -> None:
    clock = Clock()
    watch = OutageWatch(10.0, clock)
    assert watch.must_wait("orders", 1)
    clock.now += 10
    assert watch.must_wait("emails", 1)
    assert not watch.must_wait("orders", 1)


def test_without_a_wait_nothing_waits() -> None:
    watch = OutageWatch(0.0, Clock())
    assert not watch.must_wait("orders", 1)
    assert not watch.must_wait("orders", 2)


def test_leases_of_ended_workers_are_known() -> None:
    watch = OutageWatch(10.0)
    watch.note_ended("w1")
    ended, other = (Lease("orders", "a", "1:1-0", 1, worker) for worker in ("w1", "w2"))
    assert watch.has_ended(ended)
    assert watch.only_ended(None)(ended)
    assert not watch.only_ended(None)(other)
    assert not watch.only_ended(lambda lease: False)(ended)
