"""Destinations of a relay (brokers and the engine), and the encoding of events as CloudEvents.

`Destination.send` returns a result for each event; a failure to publish is a result, not an exception. An event
counts as published only when the other side has confirmed it.

Events are encoded as CloudEvents 1.0 in structured JSON, unless the settings ask for the plain payload. Headers repeat
what a trigger needs: `x-event-name`, `x-dedup-key` (the event's id), `x-tenant-id`. Headers of the writer are kept.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, Protocol

import msgspec

from holdfast.brokers.factory import build_publisher
from holdfast.brokers.port import OutgoingMessage, Publisher
from holdfast.core.job import Envelope, Receipt
from holdfast.engine.port.jobs import JobRefused
from holdfast.errors import (
    HoldfastError,
    IntakeLimited,
    IntakeRefused,
    InvalidOption,
    QueueLimitReached,
    Unavailable,
    UsageError,
)
from holdfast.ledger.port.messages import ENGINE_DESTINATION, OutboxEvent
from holdfast.outbox.writer import DUPLICATE, ENCODING, envelope_from_event, payload_of
from holdfast.settings import Settings

SPECVERSION: Final = "1.0"
STRUCTURED: Final = "application/cloudevents+json"
_JSON: Final = "application/json"
_BYTES: Final = "application/octet-stream"
_CONTENT_TYPE: Final = "content-type"
_EVENT_NAME: Final = "x-event-name"

Encoder = Callable[[OutboxEvent], OutgoingMessage]


class CloudEvent(msgspec.Struct):
    """A CloudEvent in structured JSON."""

    id: str
    source: str
    type: str
    time: str
    datacontenttype: str
    tenantid: str
    specversion: str = SPECVERSION
    subject: str | msgspec.UnsetType = msgspec.UNSET
    data: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    data_base64: bytes | msgspec.UnsetType = msgspec.UNSET


def make_encoder(settings: Settings) -> Encoder:
    """Get the encoder selected by the settings."""
    if settings.outbox_envelope == "plain":
        return plain
    source = settings.outbox_source or f"holdfast/{settings.namespace or 'default'}"
    return lambda event: to_cloud_event(event, source)


def to_cloud_event(event: OutboxEvent, source: str) -> OutgoingMessage:
    """Encode as a CloudEvent. Raises `ValueError` if the payload does not match its declared encoding."""
    body, is_json = payload_of(event)
    if is_json:
        # Checked, because it is embedded in another document and other programs may write rows.
        msgspec.json.decode(body, type=msgspec.Raw)
    content_type = event.headers.get(_CONTENT_TYPE) or (_JSON if is_json else _BYTES)
    data: dict[str, Any] = {"data": msgspec.Raw(body)} if is_json else {"data_base64": body}
    envelope = CloudEvent(
        id=event.id,
        source=source,
        type=event.headers.get(_EVENT_NAME) or event.topic,
        time=_time(event.created_at_ms),
        datacontenttype=content_type,
        tenantid=event.tenant_id,
        subject=event.key or msgspec.UNSET,
        **data,
    )
    return _outgoing(event, msgspec.json.encode(envelope), STRUCTURED)


def plain(event: OutboxEvent) -> OutgoingMessage:
    """Encode as the plain payload, with everything else in headers."""
    body, is_json = payload_of(event)
    return _outgoing(event, body, event.headers.get(_CONTENT_TYPE) or (_JSON if is_json else _BYTES))


def _outgoing(event: OutboxEvent, body: bytes, content_type: str) -> OutgoingMessage:
    own = {name: value for name, value in event.headers.items() if name != ENCODING}
    headers = {
        _EVENT_NAME: event.topic,
        **own,
        _CONTENT_TYPE: content_type,
        "x-dedup-key": event.id,
        "x-tenant-id": event.tenant_id,
    }
    return OutgoingMessage(event.topic, body, headers, event.key, event.id)


def _time(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


_log: Final = logging.getLogger("holdfast.outbox")

#: Submits each job on its own; returns a receipt or the refusal for each.
SubmitJobs = Callable[[Sequence[Envelope]], Awaitable[list[Receipt | JobRefused]]]


class Published(msgspec.Struct, frozen=True):
    """The destination confirmed the event."""

    note: str = ""


class PublishFailed(msgspec.Struct, frozen=True):
    """The event was not published, or it is unknown whether it was."""

    reason: str
    #: A retry cannot succeed.
    permanent: bool = False
    #: Temporary and not caused by the event: retried without limit.
    outage: bool = False
    #: The queue or the tenant is at its intake limit: as an outage, and no attempt is counted.
    limited: bool = False


Answer = Published | PublishFailed


class Destination(Protocol):
    """One destination. One `send` at a time; it returns within `timeout_s`."""

    async def send(self, events: Sequence[OutboxEvent], timeout_s: float) -> list[Answer]:
        """Publish events. Returns one answer per event.

        After an event failed, a broker destination writes no later one with the same topic and key.
        """
        ...

    async def close(self) -> None: ...


def build_destinations(settings: Settings, submit_jobs: SubmitJobs | None) -> dict[str, Destination]:
    """Build every destination of the settings, plus the engine if `submit_jobs` is given.

    Raises `InvalidOption` for a target that is not valid or whose extra is not installed.
    """
    encode = make_encoder(settings)
    found: dict[str, Destination] = {}
    for name, target in settings.outbox_targets.items():
        build = partial(build_publisher, target.type, target.connection)
        try:
            # Built once here, so that errors are reported at the start.
            build()
        except InvalidOption as exc:
            raise InvalidOption(f"outbox_targets.{name} (HOLDFAST_OUTBOX_TARGETS): {exc}") from exc
        found[name] = BrokerDestination(build, encode)
    if submit_jobs is not None:
        found[ENGINE_DESTINATION] = EngineDestination(submit_jobs)
    return found


class BrokerDestination(Destination):
    """Publishes to a broker. Connects on the first `send`."""

    def __init__(self, build: Callable[[], Publisher], encode: Encoder) -> None:
        self._build = build
        self._encode = encode
        self._publisher: Publisher | None = None

    async def send(self, events: Sequence[OutboxEvent], timeout_s: float) -> list[Answer]:
        answers: list[Answer | None] = [None] * len(events)
        messages: list[OutgoingMessage] = []
        blocked: set[tuple[str, str]] = set()
        for number, event in enumerate(events):
            if (event.topic, event.key) in blocked:
                answers[number] = PublishFailed("an earlier event with the same key cannot be published")
                continue
            try:
                messages.append(self._encode(event))
            except Exception as exc:  # noqa: BLE001 - another program may have written this row
                answers[number] = PublishFailed(f"cannot encode its payload: {exc}", permanent=True)
                if event.key:
                    blocked.add((event.topic, event.key))
        published = iter(await self._publish(messages, timeout_s))
        return [next(published) if answer is None else answer for answer in answers]

    async def _publish(self, messages: Sequence[OutgoingMessage], timeout_s: float) -> list[Answer]:
        try:
            async with asyncio.timeout(timeout_s):
                publisher = await self._connect()
                outcomes = await publisher.publish(messages)
        except TimeoutError:
            # Messages still in flight must not arrive after a retry, so this client is closed.
            await self.close()
            return [PublishFailed(f"the broker did not confirm within {timeout_s:g} s") for _ in messages]
        except HoldfastError as exc:
            return [PublishFailed(str(exc)) for _ in messages]
        except Exception as exc:  # noqa: BLE001 - from a client library
            _log.warning("publishing failed unexpectedly", exc_info=True)
            await self.close()
            return [PublishFailed(f"{type(exc).__name__}: {exc}") for _ in messages]
        return [Published() if error is None else PublishFailed(str(error)) for error in outcomes]

    async def close(self) -> None:
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            with suppress(HoldfastError):
                await publisher.close()

    async def _connect(self) -> Publisher:
        if self._publisher is None:
            publisher = self._build()
            try:
                await publisher.connect()
            except BaseException:
                with suppress(HoldfastError):
                    await publisher.close()
                raise
            self._publisher = publisher
        return self._publisher


class EngineDestination(Destination):
    """Submits jobs under the ids of the events: an event submitted twice is one job."""

    def __init__(self, submit_jobs: SubmitJobs) -> None:
        self._submit_jobs = submit_jobs

    async def send(self, events: Sequence[OutboxEvent], timeout_s: float) -> list[Answer]:
        answers: dict[int, Answer] = {}
        by_queue: dict[str, list[tuple[int, Envelope]]] = {}
        for number, event in enumerate(events):
            try:
                by_queue.setdefault(event.topic, []).append((number, envelope_from_event(event)))
            except UsageError as exc:
                answers[number] = PublishFailed(str(exc), permanent=True)
        # Per queue, so that a queue that refuses does not delay others.
        batches = list(by_queue.values())
        until = asyncio.get_running_loop().time() + timeout_s
        calls = [self._submit([envelope for _, envelope in batch], until) for batch in batches]
        for batch, results in zip(batches, await asyncio.gather(*calls), strict=True):
            answers.update(zip([number for number, _ in batch], results, strict=True))
        return [answers[number] for number in range(len(events))]

    async def close(self) -> None:
        """Nothing to close: the engine belongs to its owner."""

    async def _submit(self, envelopes: Sequence[Envelope], until: float) -> list[Answer]:
        try:
            async with asyncio.timeout_at(until):
                receipts = await self._submit_jobs(envelopes)
        except TimeoutError:
            return [PublishFailed("the engine did not answer in time", outage=True) for _ in envelopes]
        except QueueLimitReached as exc:
            return [PublishFailed(str(exc), outage=True, limited=True) for _ in envelopes]
        except (Unavailable, IntakeRefused) as exc:
            return [PublishFailed(str(exc), outage=True) for _ in envelopes]
        except Exception as exc:  # noqa: BLE001 - submit each alone, so that an invalid job does not block the others
            if len(envelopes) > 1:
                return [answer for each in envelopes for answer in await self._submit([each], until)]
            return [PublishFailed(str(exc) if isinstance(exc, HoldfastError) else repr(exc))]
        return [_answer(receipt) for receipt in receipts]


def _answer(receipt: Receipt | JobRefused) -> Answer:
    if isinstance(receipt, Receipt):
        return Published(f"{DUPLICATE}{receipt.job_id}" if receipt.duplicate else "")
    if isinstance(receipt, IntakeLimited):
        # Readers of the event may see only their own tenant.
        return PublishFailed(receipt.public, outage=True, limited=True)
    return PublishFailed(str(receipt), permanent=True)
