"""Where a relay hands its events over: a broker, or the engine itself. What becomes of each event is an answer, never
an exception; nothing is taken for sent unless the other side has said so."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, Protocol

import msgspec

from holdfast.brokers.factory import build_publisher
from holdfast.brokers.port import Outgoing, Publisher
from holdfast.core.job import Envelope, Receipt
from holdfast.errors import HoldfastError, IntakeRefused, InvalidOption, Unavailable, UsageError
from holdfast.ledger.outbox_store import HOLDFAST, OutboxEvent
from holdfast.outbox.cloudevents import Pack, packer
from holdfast.outbox.enqueue import DUPLICATE, envelope_of
from holdfast.settings import Settings

_log: Final = logging.getLogger("holdfast.outbox")

HandIn = Callable[[Sequence[Envelope]], Awaitable[list[Receipt]]]


class Sent(msgspec.Struct, frozen=True):
    """The other side has it."""

    note: str = ""


class Failed(msgspec.Struct, frozen=True):
    """It does not, or nobody knows."""

    why: str
    #: Trying again will not help.
    hopeless: bool = False
    #: Not the event's fault, and passing: it is tried for as long as that takes.
    patient: bool = False


Answer = Sent | Failed


class Outlet(Protocol):
    """One destination. One `send` at a time; it comes back within `timeout_s`."""

    async def send(self, events: Sequence[OutboxEvent], timeout_s: float) -> list[Answer]:
        """One answer for each, in order. After one that failed no later one of its topic and key was written."""
        ...

    async def close(self) -> None: ...


def outlets(settings: Settings, hand_in: HandIn | None) -> dict[str, Outlet]:
    """Of every destination that the settings name, and of the engine if jobs can be handed in.

    Raises `InvalidOption` for a target that cannot be, or whose extra is not installed.
    """
    pack = packer(settings)
    found: dict[str, Outlet] = {}
    for name, target in settings.outbox_targets.items():
        build = partial(build_publisher, target.type, target.connection)
        try:
            # Once here, so that a mistake is told at the start.
            build()
        except InvalidOption as exc:
            raise InvalidOption(f"outbox_targets.{name} (HOLDFAST_OUTBOX_TARGETS): {exc}") from exc
        found[name] = BrokerOutlet(build, pack)
    if hand_in is not None:
        found[HOLDFAST] = EngineOutlet(hand_in)
    return found


class BrokerOutlet(Outlet):
    """Publishes to a broker; connects when there is something to say."""

    def __init__(self, build: Callable[[], Publisher], pack: Pack) -> None:
        self._build = build
        self._pack = pack
        self._publisher: Publisher | None = None

    async def send(self, events: Sequence[OutboxEvent], timeout_s: float) -> list[Answer]:
        answers: list[Answer | None] = [None] * len(events)
        messages: list[Outgoing] = []
        spoiled: set[tuple[str, str]] = set()
        for number, event in enumerate(events):
            if (event.topic, event.key) in spoiled:
                answers[number] = Failed("an earlier event of its key cannot be published")
                continue
            try:
                messages.append(self._pack(event))
            except Exception as exc:  # noqa: BLE001 - somebody else wrote this row, and it may be anything
                answers[number] = Failed(f"its payload cannot be read: {exc}", hopeless=True)
                if event.key:
                    spoiled.add((event.topic, event.key))
        told = iter(await self._publish(messages, timeout_s))
        return [next(told) if answer is None else answer for answer in answers]

    async def _publish(self, messages: Sequence[Outgoing], timeout_s: float) -> list[Answer]:
        try:
            async with asyncio.timeout(timeout_s):
                publisher = await self._connected()
                outcomes = await publisher.publish(messages)
        except TimeoutError:
            # What is still on its way must not arrive after a second try: this client writes nothing more.
            await self.close()
            return [Failed(f"the broker did not confirm within {timeout_s:g} s") for _ in messages]
        except HoldfastError as exc:
            return [Failed(str(exc)) for _ in messages]
        except Exception as exc:  # noqa: BLE001 - a client library's own
            _log.warning("publishing failed in an unexpected way", exc_info=True)
            await self.close()
            return [Failed(f"{type(exc).__name__}: {exc}") for _ in messages]
        return [Sent() if error is None else Failed(str(error)) for error in outcomes]

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


class EngineOutlet(Outlet):
    """Hands jobs in, under the events' own ids: what the engine has already is the same job."""

    def __init__(self, hand_in: HandIn) -> None:
        self._hand_in = hand_in

    async def send(self, events: Sequence[OutboxEvent], timeout_s: float) -> list[Answer]:
        answers: dict[int, Answer] = {}
        by_queue: dict[str, list[tuple[int, Envelope]]] = {}
        for number, event in enumerate(events):
            try:
                by_queue.setdefault(event.topic, []).append((number, envelope_of(event)))
            except UsageError as exc:
                answers[number] = Failed(str(exc), hopeless=True)
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
            return [Failed("the engine did not answer in time", patient=True) for _ in envelopes]
        except (Unavailable, IntakeRefused) as exc:
            return [Failed(str(exc), patient=True) for _ in envelopes]
        except Exception as exc:  # noqa: BLE001 - one of them is at fault, and the others are not to wait for it
            if len(envelopes) > 1:
                return [answer for each in envelopes for answer in await self._submit([each], until)]
            return [Failed(str(exc) if isinstance(exc, HoldfastError) else repr(exc))]
        return [Sent(f"{DUPLICATE}{receipt.job_id}" if receipt.duplicate else "") for receipt in receipts]
