"""A FastAPI application with holdfast's API mounted in it.

    uvicorn workflow_apply.web:web --app-dir examples

With `HOLDFAST_HTTP_WORKER=true` the worker runs in this process; otherwise start one as well (see `tasks.py`). Access
to `/api/workflows` is up to this application; everything under `/holdfast` needs a token.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

from fastapi import FastAPI, Header, HTTPException, Query, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from holdfast import Job
from holdfast.errors import IntakeRefused, JobFailed, Unavailable, UnknownJob, WaitTimeout
from holdfast.http import mount
from workflow_apply.tasks import QUEUE, Workflow, app, execute

web = FastAPI(title="workflows")
mount(web, app, prefix="/holdfast")


class Apply(BaseModel):
    """A request."""

    workflow_id: str = Field(min_length=1, max_length=100)
    stage_id: str = Field(min_length=1, max_length=100)
    prompt: str = Field(min_length=1, max_length=20_000)
    user: str = Field("", max_length=100)


class Status(BaseModel):
    """The status of a workflow."""

    id: str
    status: str
    retry_count: int = 0
    output: str | None = None
    error_code: str | None = None
    duplicate: bool = False


@web.post("/api/workflows/apply", responses={202: {"model": Status}})
async def apply(
    request: Apply,
    wait: Annotated[float, Query(ge=0, le=60)] = 30,
    idempotency_key: Annotated[str | None, Header(max_length=255)] = None,
) -> JSONResponse:
    """Submit a stage and wait for its result: 200 with the model's output, or 202 with an id to poll."""
    key = idempotency_key or f"{request.workflow_id}:{request.stage_id}"
    way = execute.options(idempotency_key=key, context={"user": request.user})
    job = await way.submit(Workflow(request.workflow_id, request.stage_id, request.prompt))
    if wait:
        try:
            outcome = await job.result(timeout=wait)
        except (WaitTimeout, JobFailed):
            # Not finished or failed: the status below has the details.
            pass
        else:
            done = Status(id=job.id, status="succeeded", output=outcome.output, duplicate=job.duplicate)
            return JSONResponse(done.model_dump())
    return JSONResponse((await _status(job)).model_dump(), 202)


@web.get("/api/workflows/{job_id}")
async def status(job_id: str) -> Status:
    """The status of a workflow."""
    return await _status(app.job(job_id, QUEUE))


async def _status(job: Job[Any]) -> Status:
    try:
        view = await job.info()
    except UnknownJob:
        raise HTTPException(404, "no such workflow") from None
    output = None if view.result is None else json.loads(view.result)["output"]
    return Status(
        id=job.id,
        status=view.state,
        retry_count=view.meta.retry_count,
        output=output,
        error_code=view.failure.code if view.failure is not None else None,
        duplicate=job.duplicate,
    )


@web.exception_handler(Unavailable)
async def unavailable(_: Request, exc: Unavailable) -> JSONResponse:
    """Nothing was accepted; the caller may retry."""
    return JSONResponse({"code": exc.code, "detail": str(exc)}, 503, {"retry-after": "2"})


@web.exception_handler(IntakeRefused)
async def refused(_: Request, exc: IntakeRefused) -> JSONResponse:
    """Intake is paused, or the backlog is at its limit."""
    return JSONResponse({"code": exc.code, "detail": str(exc)}, 429, {"retry-after": "5"})
