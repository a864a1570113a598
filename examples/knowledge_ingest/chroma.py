"""A client of a Chroma server over HTTP (API v2). All calls are idempotent."""

from __future__ import annotations

from hashlib import sha256
from typing import Any, Final

import httpx

_COLLECTIONS: Final = "/api/v2/tenants/default_tenant/databases/default_database/collections"


def chunk_id(document_id: str, number: int, text: str) -> str:
    """One chunk of a document. Writing it again replaces the same record."""
    return f"{document_id}:{number}:{digest(text)[:16]}"


def digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()


class Chroma:
    """One collection, created on first use."""

    def __init__(self, base_url: str, collection: str) -> None:
        self._collection = collection
        self._client = httpx.AsyncClient(base_url=base_url, timeout=10, trust_env=False)

    async def __aenter__(self) -> Chroma:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def replace(self, document_id: str, title: str, chunks: list[str], vectors: list[list[float]]) -> None:
        """Replace the chunks of a document."""
        collection = await self._open()
        version = digest("\n".join(chunks))
        about = {"document_id": document_id, "title": title, "version": version}
        records = {
            "ids": [chunk_id(document_id, number, chunk) for number, chunk in enumerate(chunks)],
            "documents": chunks,
            "embeddings": vectors,
            "metadatas": [about | {"chunk": number} for number in range(len(chunks))],
        }
        # New before old: a search in between finds the document twice rather than not at all.
        await self._post(f"{collection}/upsert", records)
        older = {"$and": [{"document_id": document_id}, {"version": {"$ne": version}}]}
        await self._post(f"{collection}/delete", {"where": older})

    async def search(self, vector: list[float], limit: int) -> list[dict[str, Any]]:
        """Return the chunks nearest to the vector, nearest first."""
        query = {
            "query_embeddings": [vector],
            "n_results": limit,
            "include": ["documents", "metadatas", "distances"],
        }
        found = await self._post(f"{await self._open()}/query", query)
        rows = zip(found["documents"][0], found["metadatas"][0], found["distances"][0], strict=True)
        return [
            {"documentId": about["document_id"], "title": about["title"], "text": text, "similarity": 1 - distance}
            for text, about, distance in rows
        ]

    async def _open(self) -> str:
        body = {"name": self._collection, "get_or_create": True, "configuration": {"hnsw": {"space": "cosine"}}}
        return f"{_COLLECTIONS}/{(await self._post(_COLLECTIONS, body))['id']}"

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        answer = await self._client.post(path, json=body)
        answer.raise_for_status()
        return answer.json()
