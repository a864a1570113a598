"""The tasks of a run, the same in the program that checks and in the worker processes that it starts and kills."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from holdfast.acceptance.room import MAIN
from holdfast.app import Holdfast
from holdfast.core.retry import Retry
from holdfast.settings import Settings
from holdfast.worker.context import Context

#: Retries at once: nobody waits for a backoff here.
_AT_ONCE: Final = Retry(max_retries=3, base=0, jitter=None)

#: What `hold` does, by job id: the killed and the paused worker never end it, the one that takes over does at once.
Hold = Callable[[str], Awaitable[str]]


class Outside:
    """The world outside, where effects happen; it counts them."""

    def __init__(self) -> None:
        self.happened: list[str] = []

    async def act(self, key: str) -> str:
        self.happened.append(key)
        return f"done for {key}"


def build(settings: Settings, hold: Hold, outside: Outside) -> Holdfast:
    """An app with all tasks of a run."""
    app = Holdfast(settings=settings)

    @app.task(name="add", queue=MAIN)
    async def add(left: int, right: int) -> int:
        return left + right

    @app.task(name="fail", queue=MAIN, retry=_AT_ONCE)
    async def fail(ctx: Context, times: int) -> str:
        if ctx.retry_count < times:
            raise RuntimeError(f"failure {ctx.retry_count + 1} of {times}")
        return "succeeded"

    @app.task(name="fail_and_suspend", queue=MAIN, retry=_AT_ONCE, on_exhausted="suspend")
    async def fail_and_suspend(ctx: Context, mended: str) -> str:
        if mended not in outside.happened:
            raise RuntimeError("the outside is broken")
        return "succeeded"

    @app.task(name="pay", queue=MAIN, retry=_AT_ONCE)
    async def pay(ctx: Context, order: str) -> str:
        receipt = await ctx.effect(f"pay:{order}", outside.act, order)
        if ctx.retry_count == 0:
            raise RuntimeError("the run fails after its effect")
        return str(receipt)

    @app.task(name="act", queue=MAIN)
    async def act(key: str) -> str:
        return await outside.act(key)

    @app.task(name="ask", queue=MAIN)
    async def ask(ctx: Context, what: str) -> str:
        consent = await ctx.approval("proceed", {"what": what}, reason="holdfast verify asks")
        return f"{what}, approved by {', '.join(consent.by)}"

    @app.task(name="hold", queue=MAIN)
    async def hold_on(ctx: Context) -> str:
        return await hold(ctx.job_id)

    return app
