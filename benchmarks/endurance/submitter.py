"""Submits a mix of jobs: `python -m benchmarks.endurance.submitter RATE SECONDS`; RATE 0 is flat out.

Flat out it keeps a few thousand jobs ready, so that workers never wait and no backlog grows. Prints what was
submitted as JSON at its end, which SIGTERM brings about sooner.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections import Counter
from typing import Final

import redis.asyncio
import uvloop

from benchmarks.endurance.jobs import app, failing, flaky, plain
from benchmarks.sides.channel import ARGUMENT

#: Share of each kind of job; the rest is plain. Of the keyed ones every second is a duplicate.
FLAKY: Final = 0.03
FAILING: Final = 0.002
DELAYED: Final = 0.03
KEYED: Final = 0.01
DELAY_S: Final = 2
_TENANTS: Final = ("default", "acme", "globex")
_STEP_S: Final = 0.02
_BATCH: Final = 500
_READY_JOBS: Final = 4_000


class Submitter:
    """One process's submissions."""

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()
        self._plain = [plain.options(tenant_id=tenant) for tenant in _TENANTS]
        self._late = plain.options(delay=DELAY_S)
        self._stopped = False

    def stop(self) -> None:
        self._stopped = True

    async def at(self, per_s: float, seconds: float) -> None:
        """At a steady pace, in small bulks."""
        began, jobs = time.monotonic(), 0
        while (passed := time.monotonic() - began) < seconds and not self._stopped:
            due = int(passed * per_s) - jobs
            if due > 0:
                # What is owed after a pause is made up for in batches, not in one lump.
                jobs += await self._some(min(due, _BATCH))
            if due <= _BATCH:
                await asyncio.sleep(_STEP_S)

    async def flat_out(self, seconds: float) -> None:
        """As fast as the workers take them."""
        client = redis.asyncio.Redis.from_url(os.environ["HOLDFAST_URL"])
        began = time.monotonic()
        try:
            while time.monotonic() - began < seconds and not self._stopped:
                if await client.xlen("stream:task") < _READY_JOBS:
                    await self._some(_BATCH)
                else:
                    await asyncio.sleep(_STEP_S / 4)
        finally:
            await client.aclose()

    async def _some(self, count: int) -> int:
        """The next jobs, of all kinds; a kind is due when its share of the jobs sent is a whole job."""
        total = self.sent.total() + count
        shares = {"flaky": FLAKY, "failing": FAILING, "delayed": DELAYED, "keyed": KEYED}
        due = {kind: int(total * share) - self.sent[kind] for kind, share in shares.items()}
        rest = max(0, count - sum(due.values()))
        tenant = self._plain[self.sent.total() % len(self._plain)]
        await tenant.submit_many((ARGUMENT,) for _ in range(rest))
        await flaky.submit_many((ARGUMENT,) for _ in range(due["flaky"]))
        await failing.submit_many((ARGUMENT,) for _ in range(due["failing"]))
        await self._late.submit_many((ARGUMENT,) for _ in range(due["delayed"]))
        await asyncio.gather(*(self._keyed(self.sent["keyed"] + number) for number in range(due["keyed"])))
        self.sent.update({**due, "plain": rest})
        return rest + sum(due.values())

    async def _keyed(self, number: int) -> None:
        key = f"{os.getpid()}-{number // 2}"
        await plain.options(idempotency_key=key).submit(ARGUMENT)


async def submit(per_s: float, seconds: float) -> None:
    """The whole life of this process."""
    async with app:
        submitter = Submitter()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, submitter.stop)
        await (submitter.at(per_s, seconds) if per_s else submitter.flat_out(seconds))
        print(json.dumps(submitter.sent), flush=True)


if __name__ == "__main__":
    uvloop.run(submit(float(sys.argv[1]), float(sys.argv[2])))
