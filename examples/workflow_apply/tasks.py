"""The task: call a model, store its answer in MongoDB and return it.

`holdfast worker examples/workflow_apply/tasks.py:app` runs it in a separate process. Settings come from the
environment: `HOLDFAST_*` for holdfast, `OPENAI_BASE_URL`, `OPENAI_API_KEY`, `OPENAI_MODEL`, `MONGO_URL`, and
`WORKFLOW_RETRY_DELAYS` (seconds).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from typing import Any

import httpx
from pymongo import AsyncMongoClient

from holdfast import Context, Fatal, Holdfast, Retry, Unavailable
from holdfast.mongo import UNAVAILABLE, upsert_once

QUEUE = "workflows"

app = Holdfast()

#: Three runs: the second after a minute, the third after five more. Then an operator decides.
DELAYS = [float(text) for text in os.environ.get("WORKFLOW_RETRY_DELAYS", "60,300").split(",")]


@dataclass(frozen=True)
class Workflow:
    """One stage of a workflow and its prompt."""

    workflow_id: str
    stage_id: str
    prompt: str


@dataclass(frozen=True)
class Outcome:
    """The result of a stage."""

    workflow_id: str
    stage_id: str
    output: str


@app.task(
    name="workflow.execute",
    queue=QUEUE,
    retry=Retry(max_attempts=len(DELAYS) + 1, delays=DELAYS),
    on_exhausted="suspend",
    # While MongoDB or the model is down, the job waits and uses up no retry.
    unavailable_on=(*UNAVAILABLE, httpx.NetworkError, httpx.TimeoutException),
    timeout=120,
)
async def execute(ctx: Context, workflow: Workflow) -> Outcome:
    """Run one stage."""
    # A step: while MongoDB is unreachable the model is not called, and paid for, repeatedly.
    output = await ctx.step("model", call_model, workflow.prompt)
    stored = await upsert_once(
        mongo().workflows.stages,
        ctx.idempotency_key,
        {
            "workflow_id": workflow.workflow_id,
            "stage_id": workflow.stage_id,
            "prompt": workflow.prompt,
            "output": output,
            "job_id": ctx.job_id,
            "trace_id": ctx.trace_id,
        },
        tenant_id=ctx.tenant_id,
    )
    return Outcome(workflow.workflow_id, workflow.stage_id, stored["output"])


async def call_model(prompt: str) -> str:
    """Call the model at any endpoint with OpenAI's protocol; returns its answer."""
    base = os.environ.get("OPENAI_BASE_URL", "https://api.openai.com/v1")
    model = os.environ.get("OPENAI_MODEL", "gpt-4o-mini")
    key = os.environ.get("OPENAI_API_KEY")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    body = {"model": model, "messages": [{"role": "user", "content": prompt}]}
    async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
        answer = await client.post(f"{base}/chat/completions", json=body, headers=headers)
    if answer.status_code in (429, 502, 503, 504):
        raise Unavailable(f"the model answers {answer.status_code}")
    if answer.status_code in (400, 401, 403, 404, 422):
        raise Fatal(f"the model refuses: {answer.status_code}")
    answer.raise_for_status()
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


@cache
def mongo() -> AsyncMongoClient[dict[str, Any]]:
    """One client per process; connects on first use."""
    url = os.environ.get("MONGO_URL", "mongodb://127.0.0.1:27017")
    return AsyncMongoClient(url, serverSelectionTimeoutMS=2_000)
