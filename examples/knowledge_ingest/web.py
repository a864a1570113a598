"""HTTP routes: upload a document, get its status, search.

    uvicorn knowledge_ingest.web:web --app-dir examples --port 8080

With `HOLDFAST_HTTP_WORKER=true` the worker runs in this process; otherwise start one as well (see `tasks.py`). Access
to `/api/knowledge` is up to this application; everything under `/holdfast` needs a token.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any, Final

import httpx
from fastapi import FastAPI, HTTPException, Query, Request
from fastapi.responses import JSONResponse
from pydantic import Field

from holdfast.errors import IntakeRefused, Unavailable
from holdfast.http import mount
from knowledge_ingest.chroma import Chroma, digest
from knowledge_ingest.documents import Documents
from knowledge_ingest.embedding import embed
from knowledge_ingest.settings import settings
from knowledge_ingest.status import Model, TaskStatus, get_event_status, get_job_status, queued_status
from knowledge_ingest.tasks import app, ingest

_THROUGH_KAFKA: Final = settings.ingest_queue == "kafka"
_documents = Documents()


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    """Open PostgreSQL in mode `kafka` only."""
    if _THROUGH_KAFKA:
        await _documents.open()
    yield
    await _documents.close()


web = FastAPI(title="knowledge", lifespan=lifespan)
mount(web, app, prefix="/holdfast")


class Document(Model):
    """An uploaded document."""

    title: str = Field("", max_length=500)
    text: str = Field(min_length=1, max_length=200_000, pattern=r"\S")
    #: Default: derived from the text, so that the same text is the same document.
    document_id: str | None = Field(None, min_length=1, max_length=100)


class Accepted(Model):
    """Response to an upload."""

    task_id: str
    document_id: str


@web.post("/api/knowledge/documents/upload-async", status_code=202)
async def upload(document: Document) -> Accepted:
    """Accept a document. It will be ingested, or its task reports the error."""
    document_id = document.document_id or digest(document.text)[:32]
    if _THROUGH_KAFKA:
        task_id = await _documents.save(document_id, document.title, document.text)
    else:
        task_id = (await ingest.submit(document_id, document.title, document.text)).id
    return Accepted(task_id=task_id, document_id=document_id)


@web.get("/api/knowledge/tasks/{task_id}")
async def status(task_id: str) -> TaskStatus:
    """The status of a task."""
    found = await get_event_status(task_id) if _THROUGH_KAFKA else await get_job_status(task_id, task_id)
    if found is None and _THROUGH_KAFKA and (event := await _documents.event(task_id)):
        found = queued_status(task_id, event)
    if found is None:
        raise HTTPException(404, "no such task")
    return found


@web.get("/api/knowledge/search")
async def search(q: Annotated[str, Query(min_length=1)], limit: Annotated[int, Query(ge=1, le=50)] = 3) -> Any:
    """Search by meaning."""
    [vector] = await asyncio.to_thread(embed, [q])
    async with Chroma(settings.chroma_base_url, settings.chroma_collection) as chroma:
        return {"results": await chroma.search(vector, limit)}


@web.exception_handler(httpx.HTTPError)
async def store_unavailable(_: Request, exc: httpx.HTTPError) -> JSONResponse:
    """The vector store is unreachable; uploads are still accepted."""
    return JSONResponse({"code": "VECTOR_STORE", "detail": str(exc)}, 503, {"retry-after": "2"})


@web.exception_handler(Unavailable)
async def unavailable(_: Request, exc: Unavailable) -> JSONResponse:
    """Nothing was accepted; the caller may retry."""
    return JSONResponse({"code": exc.code, "detail": str(exc)}, 503, {"retry-after": "2"})


@web.exception_handler(IntakeRefused)
async def refused(_: Request, exc: IntakeRefused) -> JSONResponse:
    """Intake is paused, or the backlog is at its limit."""
    return JSONResponse({"code": exc.code, "detail": str(exc)}, 429, {"retry-after": "5"})
