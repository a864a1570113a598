"""Ends open streams and waiting requests whose token is no longer valid.

A token is checked when a request begins. A request that stays open is checked again: one task per process reads all
tokens of open requests every second, in one query, and none while there are none. A request ends within `ENDS_S` if its
token was revoked, has expired, or has another role or other tenants.

If the ledger does not answer, nothing is known of revocations, and requests end in the same time: then the promise does
not depend on it. Streams lose nothing by that, because they continue after their last event.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from holdfast.core.principal import Principal
from holdfast.operations.access import CACHE_S

_log: Final = logging.getLogger("holdfast.http")

#: How long an open request may outlast its token.
ENDS_S: Final = 5.0
_INTERVAL_S: Final = 1.0
#: A request may take this long to end by itself; then its connection is aborted: its client may not read.
_ABORT_S: Final = 0.5
#: How long ago a token may have been read.
_UNKNOWN_S: Final = ENDS_S - _ABORT_S - 0.25
#: The shortest time that the ledger gets for its answer.
_ANSWER_S: Final = 0.25


class OpenRequest:
    """A request that stays open. `end` ends it as soon as its client reads, `abort` at once."""

    __slots__ = ("abort", "end", "principal", "read_at", "token_id")

    def __init__(
        self, token_id: str, principal: Principal, end: Callable[[], None], abort: Callable[[], None], read_at: float
    ) -> None:
        self.token_id = token_id
        self.principal = principal
        self.end = end
        self.abort = abort
        #: When its token was last read as valid.
        self.read_at = read_at


class TokenWatch:
    """The open requests of one process. One event loop."""

    def __init__(
        self,
        find_valid: Callable[[Sequence[str]], Awaitable[Mapping[str, Principal]]],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._find_valid = find_valid
        self._monotonic = monotonic
        self._open: set[OpenRequest] = set()
        self._watching: asyncio.Task[None] | None = None

    @contextmanager
    def watching(
        self, token_id: str, principal: Principal, end: Callable[[], None], abort: Callable[[], None]
    ) -> Iterator[None]:
        """End the request if its token becomes invalid while the block runs. Without a token id nothing is watched."""
        if not token_id:
            yield
            return
        # Its token may have come from the cache.
        request = OpenRequest(token_id, principal, end, abort, self._monotonic() - CACHE_S)
        self._open.add(request)
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch(), name="holdfast-http-token-watch")
        try:
            yield
        finally:
            self._open.discard(request)

    async def close(self) -> None:
        """Stop watching."""
        watching, self._watching = self._watching, None
        if watching is not None:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def check(self) -> bool:
        """Read the tokens of all open requests once, and end those that are invalid; whether the ledger answered."""
        requests = list(self._open)
        token_ids = sorted({request.token_id for request in requests})
        begun = self._monotonic()
        oldest = min((request.read_at for request in requests), default=begun)
        try:
            async with asyncio.timeout(max(_ANSWER_S, oldest + _UNKNOWN_S - begun)):
                valid = await self._find_valid(token_ids)
        except Exception as exc:  # noqa: BLE001 - whatever it is, the tokens are unknown
            _log.info("the tokens of open requests cannot be read: %r", exc)
            self._end([each for each in requests if self._monotonic() >= each.read_at + _UNKNOWN_S - _ANSWER_S])
            return False
        for request in requests:
            if valid.get(request.token_id) == request.principal:
                request.read_at = begun
        self._end([each for each in requests if valid.get(each.token_id) != each.principal])
        return True

    def _end(self, requests: Sequence[OpenRequest]) -> None:
        loop = asyncio.get_running_loop()
        for request in requests:
            if request in self._open:
                request.end()
                loop.call_later(_ABORT_S, self._abort, request)

    def _abort(self, request: OpenRequest) -> None:
        if request in self._open:
            request.abort()

    async def _watch(self) -> None:
        answered = True
        while self._open:
            await asyncio.sleep(_INTERVAL_S if answered else _ANSWER_S)
            answered = not self._open or await self.check()
        self._watching = None
