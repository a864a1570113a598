"""MongoDB for tasks (requirement E5): one document per idempotency key, and results of jobs.

    from holdfast.mongo import upsert_once

    order = await upsert_once(db.orders, ctx.idempotency_key, {"total": 12}, tenant_id=ctx.tenant_id)

Needs `pip install 'holdfast[mongo]'` (PyMongo's own asyncio client). While MongoDB does not answer, everything here
raises `Unavailable`, and the job backs off without using up retries. For your own calls use
`@app.task(unavailable_on=UNAVAILABLE)`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Final
from weakref import WeakKeyDictionary

from holdfast._platform import unsupported_error

if (_unsupported := unsupported_error()) is not None:
    raise _unsupported

from holdfast.core.codec import decode_json, encode_json
from holdfast.core.job import DEFAULT_TENANT
from holdfast.errors import Unavailable, UsageError
from holdfast.execution.context import Context
from holdfast.extras import missing

if (_error := missing("holdfast.mongo", "pymongo.asynchronous")) is not None:
    raise _error

from pymongo import ASCENDING
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.asynchronous.mongo_client import AsyncMongoClient
from pymongo.errors import (
    AutoReconnect,
    ConnectionFailure,
    DuplicateKeyError,
    NetworkTimeout,
    NotPrimaryError,
    ServerSelectionTimeoutError,
    WaitQueueTimeoutError,
)

__all__ = ["UNAVAILABLE", "ResultSink", "upsert_once"]

Document = dict[str, Any]

#: PyMongo's exceptions that mean "MongoDB does not answer", for `@app.task(unavailable_on=UNAVAILABLE)`.
UNAVAILABLE: Final = (
    ServerSelectionTimeoutError,
    AutoReconnect,
    NetworkTimeout,
    NotPrimaryError,
    WaitQueueTimeoutError,
    ConnectionFailure,
)

_INDEX: Final = [("tenant_id", ASCENDING), ("idempotency_key", ASCENDING)]
_INDEX_NAME: Final = "holdfast_idempotency_key"
_KEY_FIELDS: Final = ("tenant_id", "idempotency_key")

#: Collections whose index is known to exist, by client.
_indexed: WeakKeyDictionary[AsyncMongoClient[Any], set[str]] = WeakKeyDictionary()


async def upsert_once(
    collection: AsyncCollection[Any], key: str, document: Mapping[str, Any], *, tenant_id: str = DEFAULT_TENANT
) -> Document:
    """Insert the document under the key unless one exists; returns the stored document with its `_id`.

    `tenant_id` and `idempotency_key` are added to it, with a unique index over both. Of any number of calls, concurrent
    or later, one inserts the document and all return it.
    """
    _check_key(key)
    names = {"tenant_id": tenant_id, "idempotency_key": key}
    fresh = _without_names(document, names)
    with outages():
        await _ensure_index(collection)
        # A retry usually finds the document, and writes nothing.
        stored = await collection.find_one(names)
        if stored is None:
            try:
                await collection.update_one(names, {"$setOnInsert": fresh or names}, upsert=True)
            except DuplicateKeyError:
                # A concurrent insert came first, or another unique index of the collection was violated.
                stored = await collection.find_one(names)
                if stored is None:
                    raise
            else:
                stored = await collection.find_one(names)
    return dict(stored or names)


class ResultSink:
    """Stores results of jobs in a collection: one document per job, even if it is written repeatedly."""

    def __init__(self, collection: AsyncCollection[Any]) -> None:
        self._collection = collection

    async def write(self, ctx: Context, result: Any) -> Document:
        """Store the job's result unless one is stored already. Returns the stored document."""
        plain = decode_json(encode_json(result, "the result"), "the result")
        document = {
            "queue": ctx.queue,
            "job_id": ctx.job_id,
            "task": ctx.task,
            "attempt": ctx.attempt,
            "trace_id": ctx.trace_id,
            "result": plain,
            "at": datetime.now(UTC),
        }
        return await upsert_once(self._collection, f"{ctx.queue}:{ctx.job_id}", document, tenant_id=ctx.tenant_id)


@contextmanager
def outages() -> Iterator[None]:
    """Raise PyMongo's outage exceptions as `Unavailable`."""
    try:
        yield
    except UNAVAILABLE as exc:
        raise Unavailable(f"MongoDB does not answer: {exc}") from exc


async def _ensure_index(collection: AsyncCollection[Any]) -> None:
    """Create the index that makes a key unique, once per collection and client.

    A collection that is dropped while a worker runs has no index until the worker is restarted.
    """
    known = _indexed.setdefault(collection.database.client, set())
    if collection.full_name not in known:
        await collection.create_index(_INDEX, unique=True, name=_INDEX_NAME)
        known.add(collection.full_name)


def _check_key(key: object) -> None:
    if not isinstance(key, str) or not key:
        raise UsageError(f"the idempotency key must be a non-empty string, got {key!r}")


def _without_names(document: Mapping[str, Any], names: Mapping[str, str]) -> Document:
    for name in _KEY_FIELDS:
        if name in document and document[name] != names[name]:
            raise UsageError(f"the document has {name}={document[name]!r}, the call {names[name]!r}")
    return {name: value for name, value in document.items() if name not in names}
