"""The work: cut a document into chunks, embed them, write them to Chroma.

`holdfast worker examples/knowledge_ingest/tasks.py:app` runs it in a process of its own.
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
    """How many chunks there are of it now.

    No effect and no step is needed to make it once: records have ids of their own, so that a run that is made again
    (its worker died, a message came twice, an operator replays it) writes what is there already. Any failure counts as
    one of the task's attempts, also a vector store that does not answer.
    """
    pieces, vectors = await asyncio.to_thread(prepare, text)
    async with Chroma(settings.chroma_base_url, settings.chroma_collection) as chroma:
        await chroma.replace(document_id, title, pieces, vectors)
    return len(pieces)


def prepare(text: str) -> tuple[list[str], list[list[float]]]:
    """Its chunks, with a vector for each."""
    pieces = chunks(text)
    if not pieces:
        raise Fatal("there is nothing to read in the document")
    return pieces, embed(pieces)
