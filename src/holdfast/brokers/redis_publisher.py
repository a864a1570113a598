"""The publishing end of Redis Streams."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from holdfast.brokers.letters import tombstone_refused
from holdfast.brokers.port import Outgoing, Publisher
from holdfast.brokers.redis_client import REDIS_ERRORS, TAKEN, RedisConnection, to_fields, translate
from holdfast.errors import BrokerRefused, BrokerUnavailable


class RedisPublisher(Publisher):
    """Appends to streams; one call is one transaction."""

    def __init__(self, connection: RedisConnection) -> None:
        self._connection = connection
        self._client = connection.client()

    def __repr__(self) -> str:
        return "RedisPublisher()"

    async def connect(self) -> None:
        try:
            await self._client.ping()
        except REDIS_ERRORS as exc:
            raise translate(exc) from None

    async def publish(self, messages: Sequence[Outgoing]) -> list[BrokerUnavailable | None]:
        answers = _unfit(messages)
        fit = [place for place, answer in enumerate(answers) if answer is None]
        if not fit:
            return answers
        try:
            async with asyncio.timeout(2 * self._connection.reply_timeout_s):
                replies = await self._append([messages[place] for place in fit])
        except REDIS_ERRORS as exc:
            replies = [exc] * len(fit)
        for place, reply in zip(fit, replies, strict=True):
            if isinstance(reply, Exception):
                answers[place] = translate(reply)
        return answers

    async def health_check(self) -> bool:
        try:
            return bool(await self._client.ping())
        except REDIS_ERRORS:
            return False

    async def close(self) -> None:
        await self._client.aclose()

    async def _append(self, messages: Iterable[Outgoing]) -> list[Any]:
        # A transaction: a server that fills up in the middle takes none of them, not the later ones only.
        async with self._client.pipeline(transaction=True) as pipe:
            limit = self._connection.max_length
            trim = () if limit is None else ("MAXLEN", "~", limit)
            for message in messages:
                fields = to_fields(message.body or b"", message.headers, message.key)
                pipe.execute_command("XADD", message.topic, *trim, "*", *fields)
            replies: list[Any] = await pipe.execute(raise_on_error=False)
            return replies


def _unfit(messages: Sequence[Outgoing]) -> list[BrokerUnavailable | None]:
    """Why a message cannot be written at all, and with it the later ones of its key."""
    failed: set[tuple[str, str]] = set()
    answers: list[BrokerUnavailable | None] = []
    for message in messages:
        answer: BrokerUnavailable | None = None
        line = (message.topic, message.key)
        if not TAKEN.isdisjoint(message.headers):
            answer = BrokerRefused(f"a message on Redis Streams cannot have headers named {' or '.join(sorted(TAKEN))}")
        elif message.body is None:
            answer = tombstone_refused("Redis Streams")
        elif message.key and line in failed:
            answer = BrokerUnavailable("an earlier message of this key was not written")
        if answer is not None:
            failed.add(line)
        answers.append(answer)
    return answers
