"""A worker process that gets a job and never ends it: `python -m tests.acceptance.stuck_worker URL NAMESPACE [LEDGER]`.

Prints its name, then a line for each job that it has begun. The test kills it in mid-run.
"""

from __future__ import annotations

import asyncio
import sys

from holdfast import Holdfast, Worker


def build(url: str, namespace: str, ledger: str | None = None) -> Holdfast:
    app = Holdfast(url, ledger=ledger, namespace=namespace, visibility_timeout_s=1, heartbeat_interval_s=0.25)

    @app.task(name="letter")
    async def letter(number: int) -> int:
        print("begun", flush=True)
        await asyncio.Event().wait()
        return number

    return app


async def main(url: str, namespace: str, ledger: str | None = None) -> None:
    worker = Worker(build(url, namespace, ledger))
    running = asyncio.create_task(worker.run())
    # Its name is made when it starts.
    await asyncio.sleep(0)
    print(worker.incarnation, flush=True)
    await running


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
