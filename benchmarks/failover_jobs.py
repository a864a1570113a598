"""The app of `benchmarks.failover`: one task that leaves a line whenever it runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from holdfast import Context, Holdfast, Retry

RUNS_VARIABLE: Final = "FAILOVER_RUNS"

app: Final = Holdfast()


@app.task(retry=Retry(max_retries=3, base=0.05, jitter=None))
async def step(ctx: Context, number: int) -> int:
    """Append with a single write, which is atomic among processes."""
    file = os.open(os.environ[RUNS_VARIABLE], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, f"{ctx.job_id}\n".encode())
    finally:
        os.close(file)
    return number


def runs(file: Path) -> list[str]:
    """The job of every run, in the order in which they began."""
    return file.read_text().split() if file.exists() else []
