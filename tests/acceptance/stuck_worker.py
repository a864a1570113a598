"""A worker process that never finishes its job: `python -m tests.acceptance.stuck_worker URL NAMESPACE [LEDGER]`.

Prints its incarnation, then a line for each job that it has started. The test kills it during the run.
"""

from __future__ import annotations

import asyncio
import sys

from holdfast import Holdfast, Worker


def build(url: str, namespace: str, ledger: str | None = None) -> Holdfast:
    app = Holdfast(url, ledger=ledger, namespace=namespace, visibility_timeout_s=1, heartbeat_interval_s=0.25)

    @app.task(name="double")
    async def double(number: int) -> int:
        print("begun", flush=True)
        await asyncio.Event().wait()
        return number

    return app


async def main(url: str, namespace: str, ledger: str | None = None) -> None:
    worker = Worker(build(url, namespace, ledger))
    running = asyncio.create_task(worker.run())
    # The incarnation is set when the worker starts.
    await asyncio.sleep(0)
    print(worker.incarnation, flush=True)
    await running


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
