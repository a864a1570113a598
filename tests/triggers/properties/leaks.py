"""Secrets in every field that can hold one, servers that repeat what they are told, and everything that is then said.

The server is as bad as real ones are: Redis quotes the arguments of a command that it does not know, AWS the request
that was signed wrongly.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from socketserver import BaseRequestHandler, ThreadingTCPServer
from threading import Thread
from typing import Any, Final, get_args
from urllib.parse import quote

from pydantic import SecretStr

from holdfast.brokers.factory import connection_model
from tests.triggers.properties.store_rig import Listener

_PLAIN: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
#: What a broker needs beside its secrets: quick to give up.
OPTIONS: Final[Mapping[str, Mapping[str, Any]]] = {
    "kafka": {
        "security_protocol": "SASL_SSL",
        "sasl_username": "app",
        "connect_timeout_s": 0.02,
        "publish_timeout_s": 0.02,
    },
    "rabbitmq": {"timeout_s": 1},
    "sqs": {"timeout_s": 1, "wait_time_s": 0, "verify": False},
    "redis": {"connect_timeout_s": 1, "reply_timeout_s": 1},
    "memory": {},
}
_SCHEMES: Final = {"rabbitmq": "amqp", "redis": "redis", "sqs": "http"}


class _Echo(BaseRequestHandler):
    """Says no, and repeats all it was told."""

    def handle(self) -> None:
        heard = self.request.recv(65_536)
        repeated = b" ".join(heard.split())
        if heard.startswith((b"*", b"AUTH", b"HELLO")):
            self.request.sendall(b"-ERR unknown command, with args beginning with: " + repeated + b"\r\n")
        elif b"HTTP/1.1" in heard:
            words = repeated.replace(b'"', b"'").replace(b"\\", b"/")
            body = b'{"__type": "SignatureDoesNotMatch", "message": "The request was: ' + words + b'"}'
            self.request.sendall(
                b"HTTP/1.1 403 No\r\nContent-Type: application/x-amz-json-1.0\r\nConnection: close\r\n"
            )
            self.request.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))


class _Server(ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone is no news."""


@contextmanager
def echo_server() -> Iterator[int]:
    """Its port."""
    with _Server(("127.0.0.1", 0), _Echo) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def secret_fields(broker: str) -> list[str]:
    """Those that hide what they hold."""
    return [
        name
        for name, field in connection_model(broker).model_fields.items()
        if SecretStr in (field.annotation, *get_args(field.annotation))
    ]


def mistakes(broker: str, fields: Mapping[str, Any], secret: str) -> Iterator[dict[str, Any]]:
    """A secret in a field that there is not, where a wrong type stands, and in an address that is not hidden."""
    yield {**fields, "no_such_field": secret}
    yield from ({**fields, name: [secret]} for name in connection_model(broker).model_fields)
    if broker == "sqs":
        yield {**fields, "endpoint_url": f"https://app:{secret}@sqs.local"}


def connection_of(broker: str, given: Mapping[str, str], port: int) -> dict[str, Any]:
    """The fields of a connection with these secrets in them."""
    fields: dict[str, Any] = dict(OPTIONS[broker])
    for name, secret in given.items():
        plain = (
            f"{_SCHEMES[broker]}://app:{quote(secret, safe='')}@127.0.0.1:{port}" if name.endswith("url") else secret
        )
        fields[name] = plain
    if broker == "kafka":
        fields["bootstrap_servers"] = f"127.0.0.1:{port}"
    elif broker == "rabbitmq" and "url" not in given:
        fields |= {"host": "127.0.0.1", "port": port}
    elif broker == "redis" and "url" not in given:
        fields["url"] = f"redis://127.0.0.1:{port}"
    elif broker == "sqs" and "endpoint_url" not in given:
        fields["endpoint_url"] = f"http://127.0.0.1:{port}"
    return fields


def said(listener: Listener) -> Iterator[str]:
    """All that any formatter could write of what was logged."""
    for _, record in listener.heard:
        yield record.getMessage()
        yield str({name: value for name, value in vars(record).items() if name not in _PLAIN})
        if record.exc_info:
            yield "".join(traceback.format_exception(*record.exc_info))


def told_by(exc: BaseException) -> Iterator[str]:
    """All that anybody could write of an error."""
    yield from ("".join(traceback.format_exception(exc)), repr(exc))


def assert_silent(texts: Iterable[str], secrets: Iterable[str]) -> None:
    """None of the secrets, neither as it is nor as it stands in an address."""
    forms = {form for secret in secrets for form in (secret, quote(secret, safe=""), quote(secret), repr(secret)[1:-1])}
    for text in texts:
        found = [form for form in forms if form in text]
        assert not found, f"{found} in: {text}"
