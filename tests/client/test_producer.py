"""A program that only submits jobs loads no code that runs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

#: Packages that an app which only submits has no use for.
NOT_FOR_PRODUCERS = ("cli", "http", "testing", "triggers", "upkeep", "verification", "worker")

#: Submits a job to a file, reads its state, and prints which modules of holdfast that has loaded.
PRODUCER = """
import asyncio, sys
from holdfast import Holdfast

app = Holdfast("sqlite:///producer.db")

@app.task
async def add(a: int, b: int) -> int:
    return a + b

async def main():
    async with app:
        job = await add.submit(1, 2)
        assert (await job.state()) == "queued"

asyncio.run(main())
print(*(name for name in sys.modules if name.startswith("holdfast")))
"""


def test_an_app_that_only_submits_loads_neither_worker_nor_upkeep(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PRODUCER], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    loaded = ran.stdout.split()
    assert "holdfast.client.submitter" in loaded
    assert [name for name in loaded if name.split(".")[1:2] and name.split(".")[1] in NOT_FOR_PRODUCERS] == []
