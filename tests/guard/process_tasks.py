"""Tasks that run in child processes, and the app that registers them."""

from __future__ import annotations

import os
from pathlib import Path

from holdfast import Context, Deny, GuardRequest, Holdfast
from holdfast.guard.decisions import Decision

app = Holdfast("sqlite://")


def make(app: Holdfast) -> None:
    app.task(process=True, name="in_child")(in_child)


@app.task(process=True)
def in_child(mark: str) -> int:
    Path(mark).touch()
    return os.getpid()


@app.task(process=True)
def approval_in_child(ctx: Context, what: str) -> str:
    return ctx.blocking.approval("child", {"what": what}, deadline=3600).by[0]


@app.task(process=True)
async def async_approval_in_child(ctx: Context, what: str) -> str:
    return (await ctx.approval("child", {"what": what})).by[0]


@app.guard
def forbidden(request: GuardRequest) -> Decision | None:
    return Deny("forbidden file") if "forbidden" in str(request.arguments) else None
