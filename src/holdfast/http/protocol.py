"""The server's side of a connection: bounds what a client may send before its token is checked.

Uvicorn bounds neither size nor number nor duration of headers. This protocol does:

- The head of a request (request line and headers) has a largest size, a largest number of headers and a time in which
  it must be complete; on a new connection the time begins when the connection is made.
- A body must arrive at a lowest rate. What comes after the response is discarded, for a short time.
- What belongs to neither head nor body (blank lines, extensions of chunks, trailers) is bounded like a head. Trailers
  are dropped: they arrive after the token was checked, and must not replace headers.
- Requests that wait behind another one on the same connection are counted, and so are connections.

A request over a limit is answered with a problem document if no earlier response is missing on its connection; then the
connection is closed. Application code bounds bodies: it reads a body only after the token was checked.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from holdfast.http.operation import Reply, problem_reply
from holdfast.http.problems import (
    AddressTooLong,
    BadRequest,
    HeadersTooLarge,
    HttpError,
    RequestTooSlow,
    TooManyConnections,
)
from holdfast.http.sse import ABORT

#: How long a refused client may still send, so that it can read the answer before the connection is reset.
_LINGER_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of one connection."""

    headers: int = 100
    #: Size of the request line, and of the whole head.
    address_bytes: int = 32 * 1024
    head_bytes: int = 64 * 1024
    #: Time for a head to arrive.
    head_s: float = 10.0
    #: In each period of this length, a body must grow by this many bytes. The rest of a body whose response is complete
    #: has one period.
    body_s: float = 20.0
    body_bytes: int = 10_000
    #: Requests on one connection that wait for an earlier one.
    pipelined: int = 64
    #: Open connections of the process.
    connections: int = 1_000_000


class BoundedProtocol(HttpToolsProtocol):
    """One connection. An operation may abort it, even if data is not yet sent."""

    def __init__(self, *arguments: Any, limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._limits = limits
        self._in_head = False
        #: When the current head or body is too late; one lazy timer compares it.
        self._late_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        #: Bytes received since a head, a part of a body or a request was last complete.
        self._unfinished = 0
        self._body_size = 0
        self._error: HttpError | None = None
        self._refused = False
        self.url = b""
        self.headers: list[tuple[bytes, bytes]] = []

    # Connection ------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.connections:
            self._refuse(TooManyConnections())
        else:
            self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if not (self._in_head or self._in_body()):
            self._begin_head()
        self._unfinished += len(data)
        super().data_received(data)
        if self._in_head and len(self.headers) > self._limits.headers:
            self._refuse(HeadersTooLarge())
        elif self._unfinished > self._limits.head_bytes:
            self._refuse(AddressTooLong() if self._in_head and self.url and not self.headers else HeadersTooLarge())

    # Parser ----------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= self._limits.pipelined:
            raise self._stop(TooManyConnections())
        if not self._in_head:
            self._begin_head()
        super().on_message_begin()
        self.scope["extensions"] = {ABORT: self._abort}  # type: ignore[dict-item]

    def on_headers_complete(self) -> None:
        # Every request passes here: as few steps as possible. Not for each header, whose number is bounded by the size.
        limits = self._limits
        if len(self.headers) > limits.headers:
            raise self._stop(HeadersTooLarge())
        if self._unfinished > limits.address_bytes:
            if len(self.url) > limits.address_bytes:
                raise self._stop(AddressTooLong())
            if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > limits.head_bytes:
                raise self._stop(HeadersTooLarge())
        super().on_headers_complete()
        # For trailers, which arrive after the token was checked.
        self.headers = []
        self._in_head = False
        # The time of the body begins when the head had to be complete.
        self._late_at += limits.body_s
        self._body_size = self._unfinished = 0

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._body_size += len(body)
        self._unfinished = 0

    def send_400_response(self, msg: str) -> None:
        self._refuse(self._error or BadRequest(msg))

    def _in_body(self) -> bool:
        """Whether a body is incomplete; also after one whose response was complete before it."""
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and cycle.more_body and not self._in_head

    def _stop(self, error: HttpError) -> HttpError:
        """Note the error that a callback raises to end the parser, which reports it as invalid HTTP."""
        self._error = error
        return error

    # Time ------------------------------------------------------------------------------------------

    def _begin_head(self) -> None:
        self._in_head = True
        self._late_at = self.loop.time() + self._limits.head_s
        if self._timer is None:
            self._timer = self.loop.call_later(self._limits.head_s, self._check_time)

    def _check_time(self) -> None:
        self._timer = None
        if self._refused or not (self._in_head or self._in_body()):
            # Between requests, or while the last one is answered. The next head starts the timer again.
            return
        now = self.loop.time()
        is_late = now >= self._late_at
        if is_late and (self.flow.read_paused or self._body_keeps_pace()):
            self._late_at, self._body_size = now + self._limits.body_s, 0
            is_late = False
        if not is_late:
            self._timer = self.loop.call_later(self._late_at - now, self._check_time)
        elif self._in_head and not self._unfinished:
            # A client that connects in advance.
            self.transport.close()
        else:
            self._refuse(RequestTooSlow())

    def _body_keeps_pace(self) -> bool:
        return self._in_body() and not self.cycle.response_complete and self._body_size >= self._limits.body_bytes

    # Refusals --------------------------------------------------------------------------------------

    def _refuse(self, error: HttpError) -> None:
        """Answer, accept no more requests, and close the connection."""
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is not None and self._in_body() and not cycle.response_complete:
            # The handler may be reading the body, or an earlier one may be running.
            may_answer = not self.pipeline and not cycle.response_started
            cycle.disconnected = True
            cycle.message_event.set()
        elif cycle is not None and not cycle.response_complete:
            # Earlier requests are complete; the last response closes the connection.
            cycle.keep_alive = False
            return
        else:
            may_answer = cycle is None or not self._in_body()
        self._unset_keepalive_if_required()
        if may_answer:
            self.transport.write(_serialize(problem_reply(error, {})))
        if may_answer and self.transport.can_write_eof():
            self.flow.resume_reading()
            self.transport.write_eof()
            self._timer = self.loop.call_later(_LINGER_S, self._abort)
        else:
            self.transport.abort()

    def _abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()


def _serialize(reply: Reply) -> bytes:
    head = STATUS_LINE[reply.status] + b"".join(
        name + b": " + value + b"\r\n" for name, value in [*reply.all_headers(), (b"connection", b"close")]
    )
    return head + b"\r\n" + reply.body
