"""adopt: messages that other programs wrote become jobs, or dead letters with the reason (requirement Q3).

A second step after the claim, because only here the names of their records are known, and every key that a
script touches must be declared. A worker that dies in between leaves the message in the pending list, where
the next one finds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from holdfast.core.job import Claim
from holdfast.engine.redis import wire
from holdfast.engine.redis.client import Purpose
from holdfast.engine.redis.keys import WIDTH
from holdfast.engine.redis.store import Store

#: Adopted in one step; foreign messages are rare and their arguments many.
_ADOPT_BATCH: Final = 100


class Delivery(msgspec.Struct, frozen=True, gc=False):
    """A message in this worker's hands: in which line, how often delivered, taken from whom (empty: nobody)."""

    line: int
    entry: Any
    deliveries: int
    owner: bytes = b""


class Adopter:
    """Takes in what other programs submitted."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def adopt(self, worker: str, queue: str, messages: Sequence[Delivery], now_ms: int) -> list[Claim]:
        """Those that become jobs, as claims; duplicates are dropped, malformed ones are dead letters."""
        claims: list[Claim] = []
        await self._store.introduce(queue)
        for start in range(0, len(messages), _ADOPT_BATCH):
            part = messages[start : start + _ADOPT_BATCH]
            claims += await self._adopt(worker, queue, part, now_ms, keep_ids=True)
        return claims

    async def _adopt(
        self, worker: str, queue: str, messages: Sequence[Delivery], now_ms: int, *, keep_ids: bool
    ) -> list[Claim]:
        store, keys = self._store, self._store.keys(queue)
        options = store.options
        adoptions = [_Adoption(message, queue, worker, keep_ids, options.payload_limit) for message in messages]
        names = [*keys.streams, keys.feed, keys.result, keys.dlq, keys.dead, keys.control, keys.waiters]
        names += [keys.job(adoption.job_id) for adoption in adoptions]
        arguments: list[Any] = [
            store.names.group,
            worker,
            store.nonce(),
            store.feed_limit,
            len(adoptions),
            options.finished_ttl_ms,
            options.result_limit,
            int(options.ledger),
            int(bool(store.names.stream_dlq)),
        ]
        key_indexes: dict[bytes, int] = {}
        for adoption in adoptions:
            key_index = 0
            if adoption.explicit_key:
                name = keys.idempotency(adoption.body.tenant_id, adoption.explicit_key)
                key_index = key_indexes.setdefault(name, len(adoptions) + len(key_indexes) + 1)
            arguments += adoption.arguments(key_index)
        lanes = {message.line // WIDTH for message in messages} - {0}
        words = await store.run_on_lines(Purpose.CLAIM, "adopt", queue, [*names, *key_indexes], arguments, lanes)
        claims: list[Claim] = []
        clashes: list[Delivery] = []
        for adoption, message, word in zip(adoptions, messages, words, strict=True):
            if word == b"adopted" and adoption.claim is not None:
                store.counts.adopted += 1
                claims.append(msgspec.structs.replace(adoption.claim, claimed_at_ms=now_ms))
            elif word == b"clash":
                clashes.append(message)
            elif word == b"dead":
                store.counts.malformed += 1
            elif word == b"duplicate":
                store.counts.skipped += 1
            elif word == b"waits":
                store.counts.not_due += 1
        if clashes:
            # A malformed message under a known job's id is a dead letter under an id of its own.
            await self._adopt(worker, queue, clashes, now_ms, keep_ids=False)
        return claims


class _Adoption:
    """One foreign message on its way to become a job or a dead letter."""

    def __init__(self, message: Delivery, queue: str, worker: str, keep_id: bool, payload_limit: int) -> None:
        self.line, self._entry = message.line, message.entry
        self._deliveries, self._owner = message.deliveries, message.owner
        self.claim: Claim | None = None
        self._fault, self._dead_letter, self._data = b"", b"", b""
        try:
            self.claim = wire.parse_foreign(self._entry, self.line, queue, worker, self._deliveries)
            wire.check_size(self.claim.payload, payload_limit)
            self.job_id = self.claim.job_id
            self.body = wire.claim_body(self.claim, self.claim.meta, 0)
            key = self.claim.idempotency_key
            self.explicit_key = key if key != self.job_id else ""
        except wire.Malformed as reason:
            self.claim = None
            fields = wire.as_dict(self._entry[1])
            failure = wire.malformed(str(reason))
            self.job_id = (wire.usable_id(fields.get(b"task_id")) if keep_id else None) or wire.made_up_id()
            dlq_id = wire.made_up_id()
            self.body = wire.malformed_body(fields, self._entry[0], self.line, failure, dlq_id)
            self.explicit_key = ""
            self._fault = wire.failure_text(failure).encode()
            self._dead_letter = wire.pack(wire.dead_letter_fields(self.job_id, self.body, failure, dlq_id))
            self._data = wire.encode_json(wire.failure_fields(failure) | {"dlq_id": dlq_id, "history": []})

    def arguments(self, key_index: int) -> tuple[Any, ...]:
        body = self.body
        return (
            self.line,
            self._entry[0],
            self._deliveries,
            self.job_id,
            self._fault,
            wire.encode_body(body) if self._fault else b"",
            self._dead_letter,
            key_index,
            body.task,
            body.payload,
            body.tenant_id,
            body.idempotency_key or self.job_id,
            body.trace_id,
            "" if self._fault else body.meta,
            self._owner,
            self._data,
        )
