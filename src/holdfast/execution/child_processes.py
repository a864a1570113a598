"""Child processes for tasks with `process=True`: the worker's pool and the child's main loop.

The processes of `holdfast worker --processes N` are not meant: `holdfast.cli.supervisor` starts those.

Parent: `ProcessPool` reuses children, and kills a child when its job is ended from outside. A child is a new
interpreter, never a fork, at the other end of a socket pair. The pool kills only children that it started itself,
through the handle that the operating system gave for them.

Child: `main` reads jobs from the socket, runs them one by one and writes outcomes. A separate thread reads, so that the
child exits immediately when its worker has ended, even during a run: a child never outlives the process that has the
lease.
The child ignores SIGINT and SIGTERM; the parent handles them.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import Final

import msgspec

from holdfast.core.job import EMPTY_META, ApprovalRequest, Claim, Failure, decode_meta
from holdfast.core.verdict import ApprovalNeeded, FailureKind, Outcome, Raised, Returned
from holdfast.execution.context import Context
from holdfast.execution.invoke import failure_outcome, invoke, invoke_sync, process_died
from holdfast.execution.spec import TaskLocation, TaskPolicy, TaskSpec, load_task, locate
from holdfast.observe.logs import current_claim

#: Every message begins with its length.
HEADER: Final = struct.Struct(">I")


class RunCommand(msgspec.Struct, frozen=True):
    """The parent's request to run one job."""

    location: TaskLocation
    #: Without its meta.
    claim: Claim
    #: As JSON: a context may contain integers that msgpack cannot.
    meta: bytes
    #: Whether the worker's app is in memory, for a test: the apps of the child must be as well.
    in_memory: bool = False

    @classmethod
    def of(cls, location: TaskLocation, claim: Claim, in_memory: bool = False) -> RunCommand:
        meta = msgspec.json.encode(claim.meta)
        return cls(location, msgspec.structs.replace(claim, meta=EMPTY_META), meta, in_memory)

    def whole_claim(self) -> Claim:
        """The claim with its meta."""
        return msgspec.structs.replace(self.claim, meta=decode_meta(self.meta))


class RunReply(msgspec.Struct, frozen=True):
    """The child's reply: a result, a failure with its kind, or an approval request."""

    result: bytes | None = None
    kind: FailureKind | None = None
    failure: Failure | None = None
    approval_request: ApprovalRequest | None = None
    message: str = ""

    @classmethod
    def from_outcome(cls, outcome: Outcome) -> RunReply:
        match outcome:
            case Returned(result=result):
                return cls(result=result)
            case Raised(kind=kind, failure=failure):
                return cls(kind=kind, failure=failure)
            case ApprovalNeeded(message=message, request=request):
                return cls(message=message, approval_request=request)
            case _:
                raise TypeError(f"a child cannot end a run with {type(outcome).__name__}")

    def outcome(self) -> Outcome:
        if self.kind is not None and self.failure is not None:
            return Raised(self.kind, self.failure)
        if self.approval_request is not None:
            return ApprovalNeeded(self.message, self.approval_request)
        return Returned(self.result or b"null")


def main(descriptor: int) -> None:
    """Run jobs until the parent closes its end of the socket."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # The worker has already warned about the same environment and the same tasks.
    for name in ("holdfast.settings", "holdfast.tasks"):
        logging.getLogger(name).setLevel(logging.ERROR)
    connection = socket.socket(fileno=descriptor)
    commands: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_read, args=(connection, commands), daemon=True).start()
    decoder = msgspec.msgpack.Decoder(RunCommand)
    with asyncio.Runner() as runner:
        while True:
            command = decoder.decode(commands.get())
            loaded = _load(command.location, in_memory=command.in_memory)
            # The job's timeout begins now, after the import.
            _send(connection, b"")
            outcome = _run(loaded, command.whole_claim(), runner) if isinstance(loaded, TaskSpec) else loaded
            _send(connection, msgspec.msgpack.encode(RunReply.from_outcome(outcome)))


def _send(connection: socket.socket, message: bytes) -> None:
    connection.sendall(HEADER.pack(len(message)) + message)


def _read(connection: socket.socket, commands: SimpleQueue[bytes]) -> None:
    try:
        with connection.makefile("rb") as stream:
            while header := stream.read(HEADER.size):
                commands.put(stream.read(HEADER.unpack(header)[0]))
    finally:
        # Also after an error: a worker that was killed before it read the reply resets the connection.
        os._exit(0)


def _load(location: TaskLocation, *, in_memory: bool = False) -> TaskSpec | Raised:
    try:
        spec = _specs.get(location.task) or _specs.setdefault(location.task, load_task(location, in_memory=in_memory))
    except BaseException as exc:  # noqa: BLE001 - importing runs the user's code
        return failure_outcome(exc, TaskPolicy())
    return spec


def _run(spec: TaskSpec, claim: Claim, runner: asyncio.Runner) -> Outcome:
    before = current_claim.set(claim)
    context = Context(claim) if spec.context_name is not None else None
    try:
        if inspect.iscoroutinefunction(spec.function):
            return runner.run(invoke(spec, claim, context))
        return invoke_sync(spec, claim, context)
    finally:
        current_claim.reset(before)
        sys.stdout.flush()


_specs: dict[str, TaskSpec] = {}


#: More children would only compete for the cores; further jobs wait, each in its slot.
MAX_CHILDREN: Final = max(4, 2 * (os.cpu_count() or 1))
_REAP_S: Final = 5.0

_MAIN: Final = (
    "import sys; sys.path[:] = {path!r}; from holdfast.execution.child_processes import main; main({descriptor})"
)


#: For apps whose code names no URL; others are reconfigured once they are loaded.
_IN_MEMORY: Final = {"HOLDFAST_URL": "sqlite://"}

_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(RunReply).decode


class ProcessPool:
    """A pool of child processes. Runs on one event loop."""

    def __init__(self, limit: int = MAX_CHILDREN, *, in_memory: bool = False) -> None:
        """`in_memory`: the worker's app is in memory, and children must not reach its configured stores."""
        self._in_memory = in_memory
        self._slots = asyncio.Semaphore(limit)
        self._idle: list[ChildProcess] = []
        self._all: set[ChildProcess] = set()
        self._locations: dict[str, TaskLocation] = {}

    async def perform(self, spec: TaskSpec, claim: Claim, started: Callable[[], None]) -> Outcome:
        """Run one job in a child; `started` is called when its code begins. A cancelled call kills its child."""
        location = self._locations.get(spec.name) or self._locations.setdefault(spec.name, locate(spec))
        command = _encode(RunCommand.of(location, claim, self._in_memory))
        async with self._slots:
            while True:
                child, fresh = await self._acquire()
                try:
                    await child.send(command)
                    started()
                    reply = await child.receive()
                except (EOFError, OSError):
                    exit_code = await self._end(child)
                    if fresh or child.started:
                        return process_died(exit_code)
                    # It ended while idle, so this job is not the cause.
                except GeneratorExit:
                    # Abandoned: nothing can be awaited here.
                    child.kill()
                    raise
                except BaseException:
                    # Ended before the verdict: the next attempt must not run concurrently with it.
                    await self._end(child)
                    raise
                else:
                    self._idle.append(child)
                    return _decode(reply).outcome()

    async def close(self) -> None:
        """End all children and wait for them."""
        children, self._all, self._idle = self._all, set(), []
        for child in children:
            child.kill()
        for child in children:
            await child.reap()

    async def _acquire(self) -> tuple[ChildProcess, bool]:
        """An idle child or a new one, and whether it is new."""
        if self._idle:
            return self._idle.pop(), False
        child = await ChildProcess.spawn(_IN_MEMORY if self._in_memory else {})
        self._all.add(child)
        return child, True

    async def _end(self, child: ChildProcess) -> int | None:
        child.kill()
        exit_code = await child.reap()
        self._all.discard(child)
        return exit_code


class ChildProcess:
    """One child process and the parent's end of its socket."""

    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self.pid = process.pid
        #: Whether the code of its latest job was reached.
        self.started = False

    @classmethod
    async def spawn(cls, variables: Mapping[str, str]) -> ChildProcess:
        """Start a child. It imports the user's code with its first job."""
        ours, theirs = socket.socketpair()
        with theirs:
            code = _MAIN.format(path=sys.path, descriptor=theirs.fileno())
            process = subprocess.Popen(  # noqa: ASYNC220 - a few milliseconds, once per child
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, **variables},
            )
        try:
            return cls(process, *await asyncio.open_connection(sock=ours))
        except BaseException:
            process.kill()
            process.wait()
            raise

    async def send(self, command: bytes) -> None:
        """Pass a job to the child, and wait for its import. Raises `EOFError` or `OSError` if it has ended."""
        self.started = False
        self._writer.write(HEADER.pack(len(command)) + command)
        await self._writer.drain()
        await self.receive()
        self.started = True

    async def receive(self) -> bytes:
        """Receive its next message: empty at the start of a job, then the outcome.

        Raises `EOFError` or `OSError` if the child has ended.
        """
        header = await self._reader.readexactly(HEADER.size)
        return await self._reader.readexactly(HEADER.unpack(header)[0])

    def kill(self) -> None:
        """Kill the child. Can be repeated, also after it has ended."""
        self._writer.close()
        self._process.kill()

    async def reap(self) -> int | None:
        """Wait for a killed child; returns its exit code, negative for a signal."""
        try:
            return await asyncio.to_thread(self._process.wait, _REAP_S)
        except subprocess.TimeoutExpired:
            return None
