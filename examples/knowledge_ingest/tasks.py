"""The task: split a document into chunks, embed them and write them to Chroma.

`holdfast worker examples/knowledge_ingest/tasks.py:app` runs it in a separate process.
"""

from __future__ import annotations

import asyncio

from holdfast import Fatal, Holdfast
from knowledge_ingest.chroma import Chroma
from knowledge_ingest.embedding import chunks, embed
from knowledge_ingest.settings import QUEUE, settings

app = Holdfast(**settings.holdfast)


@app.task(name="knowledge.ingest", queue=QUEUE, retry=settings.retry, timeout=120)
async def ingest(document_id: str, title: str, text: str) -> int:
    """Ingest a document; returns its number of chunks.

    No effect or step is needed: records have fixed ids, so a second run
    (after a crash, a duplicate message or a replay) writes the same records. Any failure counts as
    an attempt, including an unreachable vector store.
    """
    pieces, vectors = await asyncio.to_thread(prepare, text)
    async with Chroma(settings.chroma_base_url, settings.chroma_collection) as chroma:
        await chroma.replace(document_id, title, pieces, vectors)
    return len(pieces)


def prepare(text: str) -> tuple[list[str], list[list[float]]]:
    """The chunks of a document with their vectors."""
    pieces = chunks(text)
    if not pieces:
        raise Fatal("the document has no text")
    return pieces, embed(pieces)
