"""A webhook receiver on loopback. Raw sockets let it misbehave, and it checks signatures without the product's code."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from holdfast.aio import serve_tcp

SECRET = "whsec_" + base64.b64encode(b"a secret of thirty-two bytes ...").decode()
OTHER_SECRET = "whsec_" + base64.b64encode(b"another one, also of 32 bytes ..").decode()

OK = b"HTTP/1.1 204 No Content\r\n\r\n"

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Request:
    line: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.body)


@dataclass
class Receiver:
    port: int
    requests: list[Request] = field(default_factory=list)
    #: Responses to the next requests, in order; then always OK.
    answers: list[bytes | Answer] = field(default_factory=list)
    connections: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook?key=s3cret"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            line, *rest = head.split("\r\n")
            headers = {name.lower(): value for name, value in (one.split(": ", 1) for one in rest if one)}
            body = await reader.readexactly(int(headers["content-length"]))
            self.requests.append(Request(line, headers, body))
            answer = self.answers.pop(0) if self.answers else OK
            if isinstance(answer, bytes):
                writer.write(answer)
                await writer.drain()
            else:
                await answer(writer)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


@asynccontextmanager
async def run_receiver() -> AsyncIterator[Receiver]:
    receiver = Receiver(0)
    async with serve_tcp(receiver.serve, "127.0.0.1") as receiver.port:
        yield receiver


def status(code: int, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {code} Some Reason", *headers, "content-length: 0", "", ""]
    return "\r\n".join(lines).encode()


def is_signed(request: Request, secret: str) -> bool:
    """Check the signature as the Standard Webhooks specification says, without the product's code."""
    key = base64.b64decode(secret.split("_", 1)[1])
    content = b".".join(
        [request.headers["webhook-id"].encode(), request.headers["webhook-timestamp"].encode(), request.body]
    )
    expected = base64.b64encode(hmac.new(key, content, hashlib.sha256).digest()).decode()
    return any(one == f"v1,{expected}" for one in request.headers["webhook-signature"].split(" "))
