"""An app and a worker that are created at import, before any fork, as under `gunicorn --preload`.

`python -m tests.worker.forking_app` forks two workers. Each job writes the pid of its process to `begun-NUMBER` and
waits for `go-PID`. Settings come from the environment, the folder from FORKING_FOLDER.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from holdfast import Holdfast, Worker
from holdfast.http import create_api

FOLDER = Path(os.environ["FORKING_FOLDER"])

app = Holdfast(heartbeat_interval_s=0.2)


@app.task
async def wait(number: int) -> int:
    with (FOLDER / f"begun-{number}").open("a") as file:
        file.write(f"{os.getpid()}\n")
    while not (FOLDER / f"go-{os.getpid()}").exists():  # noqa: ASYNC110 - another process creates it
        await asyncio.sleep(0.01)
    return number


#: For `gunicorn --preload tests.worker.forking_app:api`.
api = create_api(app, worker=True)
worker = Worker(app)


async def work() -> None:
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.drain)
    await worker.run()


def main() -> None:
    children = []
    for _ in range(2):
        child = os.fork()
        if not child:
            asyncio.run(work())
            sys.exit()
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
