"""The child's side of `process=True`: reads jobs from a socket, runs them one by one, writes outcomes.

A thread reads, so that the child ends at once when its worker is gone, also in mid-run: a child never
outlives the process that holds the lease. Signals from a terminal or a process group are left to the parent.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import signal
import socket
import struct
import sys
import threading
from queue import SimpleQueue
from typing import Final

import msgspec

from holdfast.core.job import Ask, Claim, Failure
from holdfast.core.verdict import AskedApproval, Kind, Outcome, Raised, Returned
from holdfast.observe.current import current
from holdfast.worker.classify import raised
from holdfast.worker.context import Context
from holdfast.worker.locate import Place, load
from holdfast.worker.perform import perform, perform_sync
from holdfast.worker.plan import Plan, Policy

#: Every message begins with its length.
HEADER: Final = struct.Struct(">I")


class Order(msgspec.Struct, frozen=True):
    """Run this job."""

    place: Place
    claim: Claim
    #: The worker's app is in memory, for a test: those of this process must be, too.
    in_memory: bool = False


class Reply(msgspec.Struct, frozen=True):
    """A result, a failure and its kind, or a question to people."""

    result: bytes | None = None
    kind: Kind | None = None
    failure: Failure | None = None
    ask: Ask | None = None
    message: str = ""

    @classmethod
    def of(cls, outcome: Outcome) -> Reply:
        match outcome:
            case Returned(result=result):
                return cls(result=result)
            case Raised(kind=kind, failure=failure):
                return cls(kind=kind, failure=failure)
            case AskedApproval(message=message, ask=ask):
                return cls(message=message, ask=ask)
            case _:
                raise TypeError(f"a child cannot end a run with {type(outcome).__name__}")

    def outcome(self) -> Outcome:
        if self.kind is not None and self.failure is not None:
            return Raised(self.kind, self.failure)
        if self.ask is not None:
            return AskedApproval(self.message, self.ask)
        return Returned(self.result or b"null")


def main(descriptor: int) -> None:
    """Serve until the parent closes its end."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # The worker has reported the same environment.
    logging.getLogger("holdfast.settings").setLevel(logging.ERROR)
    connection = socket.socket(fileno=descriptor)
    orders: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_read, args=(connection, orders), daemon=True).start()
    decoder = msgspec.msgpack.Decoder(Order)
    with asyncio.Runner() as runner:
        while True:
            order = decoder.decode(orders.get())
            loaded = _load(order.place, in_memory=order.in_memory)
            # Its time begins now: what importing took is not the job's.
            _send(connection, b"")
            outcome = _run(loaded, order.claim, runner) if isinstance(loaded, Plan) else loaded
            _send(connection, msgspec.msgpack.encode(Reply.of(outcome)))


def _send(connection: socket.socket, message: bytes) -> None:
    connection.sendall(HEADER.pack(len(message)) + message)


def _read(connection: socket.socket, orders: SimpleQueue[bytes]) -> None:
    try:
        with connection.makefile("rb") as stream:
            while header := stream.read(HEADER.size):
                orders.put(stream.read(HEADER.unpack(header)[0]))
    finally:
        # Also by an error: a worker that was killed before it had read what we told it resets the connection.
        os._exit(0)


def _load(place: Place, *, in_memory: bool = False) -> Plan | Raised:
    try:
        plan = _plans.get(place.task) or _plans.setdefault(place.task, load(place, in_memory=in_memory))
    except BaseException as exc:  # noqa: BLE001 - importing runs the user's code
        return raised(exc, Policy())
    return plan


def _run(plan: Plan, claim: Claim, runner: asyncio.Runner) -> Outcome:
    before = current.set(claim)
    context = Context(claim) if plan.context_name is not None else None
    try:
        if inspect.iscoroutinefunction(plan.function):
            return runner.run(perform(plan, claim, context))
        return perform_sync(plan, claim, context)
    finally:
        current.reset(before)
        sys.stdout.flush()


_plans: dict[str, Plan] = {}
