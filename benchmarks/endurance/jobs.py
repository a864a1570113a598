"""What the workers run: mostly small jobs that succeed, some that fail once, some that fail for good."""

from __future__ import annotations

from typing import Any

from holdfast import Context, Holdfast, Retry

app = Holdfast()


@app.task(name="plain")
async def plain(argument: dict[str, Any]) -> int:
    """Succeeds."""
    return len(argument)


@app.task(name="flaky", retry=Retry(max_retries=2, base=0.5, jitter=0.3))
async def flaky(ctx: Context, argument: dict[str, Any]) -> int:
    """Fails the first time."""
    if ctx.attempt == 1:
        raise ConnectionError("the first attempt fails")
    return len(argument)


@app.task(name="failing", retry=Retry(max_retries=0))
async def failing(argument: dict[str, Any]) -> None:
    """Becomes a dead letter."""
    raise ValueError("this job always fails")
