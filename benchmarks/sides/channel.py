"""The child's end of the line to the parent: a JSON line in, a JSON line out, until the input ends."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import uvloop

from benchmarks.usage import cpu_s

Answer = dict[str, Any]
Handler = Callable[..., Awaitable[Answer]]

_ARGUMENT_BYTES: Final = 200
#: One argument that is about 200 bytes of JSON.
ARGUMENT: Final = {"n": 1, "a": "x" * (_ARGUMENT_BYTES - len('{"n":1,"a":""}'))}
#: Jobs between a call and the next one at low load come with this pause on average.
PACE_S: Final = 0.010
_POLL_S: Final = 0.002


class Spec(msgspec.Struct, frozen=True):
    """Start parameters of a child."""

    url: str
    board: str = ""
    row: int = 0
    flavour: str = ""
    settings: dict[str, Any] = {}

    @property
    def board_path(self) -> Path:
        return Path(self.board)


def main(roles: Mapping[str, Callable[[Spec], Coroutine[Any, Any, None]]]) -> None:
    """Run the role that the command line names."""
    role, spec = sys.argv[1:]
    uvloop.run(roles[role](msgspec.json.decode(spec, type=Spec)))


async def serve(handlers: Mapping[str, Handler]) -> None:
    """Say that we are ready, then answer until the parent has nothing more to ask."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    _say({})
    while line := await reader.readline():
        request = msgspec.json.decode(line)
        _say(await handlers[request.pop("do")](**request))


@contextmanager
def timed(jobs: int) -> Iterator[Answer]:
    """An answer that, once the block is left, says what these jobs took."""
    answer: Answer = {}
    cpu, began = cpu_s(), time.perf_counter()
    yield answer
    seconds = time.perf_counter() - began
    answer |= {"rate": jobs / seconds, "cpu_us": (cpu_s() - cpu) / jobs * 1e6}


async def watched(done: Callable[[], int], jobs: int) -> Answer:
    """What these jobs take: from the last look that sees none done to the one that sees all."""
    while True:
        with timed(jobs) as answer:
            await asyncio.sleep(_POLL_S)
            if not done():
                continue
            while done() < jobs:  # noqa: ASYNC110 - the counter has no event for this
                await asyncio.sleep(_POLL_S)
        return answer


async def in_parallel(callers: int, jobs: int, call: Callable[[], Awaitable[object]]) -> None:
    """Concurrent callers with one call in flight each share the jobs."""

    async def caller(count: int) -> None:
        for _ in range(count):
            await call()

    shares = [jobs // callers + (number < jobs % callers) for number in range(callers)]
    await asyncio.gather(*(caller(share) for share in shares))


async def at_low_load(jobs: int, send: Callable[[int], Awaitable[object]]) -> None:
    """One call after the other with uneven pauses, so that polling does not fall into step."""
    for number in range(jobs):
        await asyncio.sleep(PACE_S * (0.5 + (number * 0.618) % 1))
        await send(time.monotonic_ns())


def _say(answer: Answer) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.buffer.flush()
