"""Destinations of a relay (brokers and the engine), and the encoding of events as CloudEvents.

`Destination.send` returns a result for each event; a failure to publish is a result, not an exception. An event
counts as published only when the other side has confirmed it.

Events are encoded as CloudEvents 1.0 in structured JSON, unless the settings ask for the plain payload. Headers repeat
what a trigger needs: `x-event-name`, `x-dedup-key` (the event's id), `x-tenant-id`. The writer's own headers are passed
on.
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
from holdfast.errors import HoldfastError, IntakeRefused, InvalidOption, Unavailable, UsageError
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
    """The envelope's fields, by CloudEvents' names."""

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
    """Makes messages of events, as the settings want them."""
    if settings.outbox_envelope == "plain":
        return plain
    source = settings.outbox_source or f"holdfast/{settings.namespace or 'default'}"
    return lambda event: structured(event, source)


def structured(event: OutboxEvent, source: str) -> OutgoingMessage:
    """As a CloudEvent. Raises `ValueError` for a payload that is not what the row says it is."""
    body, is_json = payload_of(event)
    if is_json:
        # It becomes part of another document, and programs in other languages write rows, too.
        msgspec.json.decode(body, type=msgspec.Raw)
    named = event.headers.get(_CONTENT_TYPE) or (_JSON if is_json else _BYTES)
    data: dict[str, Any] = {"data": msgspec.Raw(body)} if is_json else {"data_base64": body}
    envelope = CloudEvent(
        id=event.id,
        source=source,
        type=event.headers.get(_EVENT_NAME) or event.topic,
        time=_time(event.created_at_ms),
        datacontenttype=named,
        tenantid=event.tenant_id,
        subject=event.key or msgspec.UNSET,
        **data,
    )
    return _outgoing(event, msgspec.json.encode(envelope), STRUCTURED)


def plain(event: OutboxEvent) -> OutgoingMessage:
    """The payload, and everything else in headers."""
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

SubmitJobs = Callable[[Sequence[Envelope]], Awaitable[list[Receipt]]]


class Published(msgspec.Struct, frozen=True):
    """The other side has it."""

    note: str = ""


class PublishFailed(msgspec.Struct, frozen=True):
    """It does not, or nobody knows."""

    why: str
    #: Trying again will not help.
    permanent: bool = False
    #: Not the event's fault, and passing: it is tried for as long as that takes.
    outage: bool = False


Answer = Published | PublishFailed


class Destination(Protocol):
    """One destination. One `send` at a time; it comes back within `timeout_s`."""

    async def send(self, events: Sequence[OutboxEvent], timeout_s: float) -> list[Answer]:
        """One answer for each, in order. After one that failed no later one of its topic and key was written."""
        ...

    async def close(self) -> None: ...


def build_destinations(settings: Settings, hand_in: SubmitJobs | None) -> dict[str, Destination]:
    """Of every destination that the settings name, and of the engine if jobs can be handed in.

    Raises `InvalidOption` for a target that cannot be, or whose extra is not installed.
    """
    pack = make_encoder(settings)
    found: dict[str, Destination] = {}
    for name, target in settings.outbox_targets.items():
        build = partial(build_publisher, target.type, target.connection)
        try:
            # Once here, so that a mistake is told at the start.
            build()
        except InvalidOption as exc:
            raise InvalidOption(f"outbox_targets.{name} (HOLDFAST_OUTBOX_TARGETS): {exc}") from exc
        found[name] = BrokerDestination(build, pack)
    if hand_in is not None:
        found[ENGINE_DESTINATION] = EngineDestination(hand_in)
    return found


class BrokerDestination(Destination):
    """Publishes to a broker; connects when there is something to say."""

    def __init__(self, build: Callable[[], Publisher], pack: Encoder) -> None:
        self._build = build
        self._pack = pack
        self._publisher: Publisher | None = None

    async def send(self, events: Sequence[OutboxEvent], timeout_s: float) -> list[Answer]:
        answers: list[Answer | None] = [None] * len(events)
        messages: list[OutgoingMessage] = []
        spoiled: set[tuple[str, str]] = set()
        for number, event in enumerate(events):
            if (event.topic, event.key) in spoiled:
                answers[number] = PublishFailed("an earlier event of its key cannot be published")
                continue
            try:
                messages.append(self._pack(event))
            except Exception as exc:  # noqa: BLE001 - somebody else wrote this row, and it may be anything
                answers[number] = PublishFailed(f"its payload cannot be read: {exc}", permanent=True)
                if event.key:
                    spoiled.add((event.topic, event.key))
        told = iter(await self._publish(messages, timeout_s))
        return [next(told) if answer is None else answer for answer in answers]

    async def _publish(self, messages: Sequence[OutgoingMessage], timeout_s: float) -> list[Answer]:
        try:
            async with asyncio.timeout(timeout_s):
                publisher = await self._connected()
                outcomes = await publisher.publish(messages)
        except TimeoutError:
            # What is still on its way must not arrive after a second try: this client writes nothing more.
            await self.close()
            return [PublishFailed(f"the broker did not confirm within {timeout_s:g} s") for _ in messages]
        except HoldfastError as exc:
            return [PublishFailed(str(exc)) for _ in messages]
        except Exception as exc:  # noqa: BLE001 - a client library's own
            _log.warning("publishing failed in an unexpected way", exc_info=True)
            await self.close()
            return [PublishFailed(f"{type(exc).__name__}: {exc}") for _ in messages]
        return [Published() if error is None else PublishFailed(str(error)) for error in outcomes]

    async def close(self) -> None:
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            with suppress(HoldfastError):
                await publisher.close()

    async def _connected(self) -> Publisher:
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
    """Hands jobs in, under the events' own ids: what the engine has already is the same job."""

    def __init__(self, hand_in: SubmitJobs) -> None:
        self._hand_in = hand_in

    async def send(self, events: Sequence[OutboxEvent], timeout_s: float) -> list[Answer]:
        answers: dict[int, Answer] = {}
        by_queue: dict[str, list[tuple[int, Envelope]]] = {}
        for number, event in enumerate(events):
            try:
                by_queue.setdefault(event.topic, []).append((number, envelope_from_event(event)))
            except UsageError as exc:
                answers[number] = PublishFailed(str(exc), permanent=True)
        # Queue by queue: one that takes nothing at the moment is no reason for others to wait.
        batches = list(by_queue.values())
        until = asyncio.get_running_loop().time() + timeout_s
        calls = [self._submit([envelope for _, envelope in batch], until) for batch in batches]
        for batch, told in zip(batches, await asyncio.gather(*calls), strict=True):
            answers.update(zip([number for number, _ in batch], told, strict=True))
        return [answers[number] for number in range(len(events))]

    async def close(self) -> None:
        """The engine is its owner's."""

    async def _submit(self, envelopes: Sequence[Envelope], until: float) -> list[Answer]:
        try:
            async with asyncio.timeout_at(until):
                receipts = await self._hand_in(envelopes)
        except TimeoutError:
            return [PublishFailed("the engine did not answer in time", outage=True) for _ in envelopes]
        except (Unavailable, IntakeRefused) as exc:
            return [PublishFailed(str(exc), outage=True) for _ in envelopes]
        except Exception as exc:  # noqa: BLE001 - one of them is at fault, and the others are not to wait for it
            if len(envelopes) > 1:
                return [answer for each in envelopes for answer in await self._submit([each], until)]
            return [PublishFailed(str(exc) if isinstance(exc, HoldfastError) else repr(exc))]
        return [Published(f"{DUPLICATE}{receipt.job_id}" if receipt.duplicate else "") for receipt in receipts]
