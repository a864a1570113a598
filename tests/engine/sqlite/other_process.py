"""The other process of the SQLite tests: `python -m tests.engine.sqlite.other_process <command> <path>`.

Prints a JSON line when it has started, and one with its result at the end.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

from holdfast.core.states import State
from holdfast.core.verdict import Settlement, Succeed
from holdfast.engine.sqlite.engine import SqliteEngine
from holdfast.sqlite.transaction import Transaction
from tests.engine.sqlite.rig import QUEUE, envelope, open_engine


def print_json(value: object) -> None:
    print(json.dumps(value), flush=True)


async def submit(engine: SqliteEngine) -> None:
    """Submit one job for each line of input."""
    print_json("ready")
    while await asyncio.to_thread(sys.stdin.readline):
        (receipt,) = await engine.submit([envelope()])
        print_json(receipt.job_id)


async def drain(engine: SqliteEngine) -> None:
    """Work until the queue is empty."""
    done = []
    print_json("ready")
    while claims := await engine.claim(f"child-{time.time_ns()}", [QUEUE], 20, 0):
        await engine.settle([Settlement(claim, Succeed(b"1"), claim.claimed_at_ms) for claim in claims])
        done += [claim.job_id for claim in claims]
    print_json(done)


async def finish(engine: SqliteEngine) -> None:
    """Claim one job, then end it on input: settled, or cancelled by an operator."""
    (claim,) = await engine.claim("child", [QUEUE], 1, 10_000)
    print_json(claim.job_id)
    line = (await asyncio.to_thread(sys.stdin.readline)).strip()
    if line == "cancel":
        await engine.move(QUEUE, claim.job_id, State.CANCELLED, actor="ann", reason="enough")
    else:
        await engine.settle([Settlement(claim, Succeed(b"1"), claim.claimed_at_ms)])
    print_json(line)


async def hammer(engine: SqliteEngine) -> None:
    """Write without a pause, until killed."""
    print_json("ready")
    while True:
        await asyncio.gather(*(engine.submit([envelope(queue="noise") for _ in range(50)]) for _ in range(4)))


async def hang(engine: SqliteEngine) -> None:
    """Stop in the middle of a transaction that has written, until killed."""
    await engine.claim("child", [QUEUE], 1, 10_000)

    def never_end(transaction: Transaction) -> None:
        transaction.run("touch_worker", worker="half-written", queue=QUEUE, now=1)
        print_json("ready")
        while True:
            time.sleep(60)

    await engine._store.write(never_end)


async def main(command: str, path: str) -> None:
    async with open_engine(Path(path)) as engine:
        await {"submit": submit, "drain": drain, "finish": finish, "hammer": hammer, "hang": hang}[command](engine)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
