"""Helpers to find leaked secrets: connections with a secret in every field, and a server that echoes requests.

Real servers echo secrets, too: Redis quotes the arguments of an unknown command, AWS a request with a wrong signature.
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
from tests.triggers.properties.store_rig import LogCapture

_STANDARD_ATTRIBUTES: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
#: Settings that a broker needs besides its secrets, with short timeouts.
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
    """Refuses every request and echoes it."""

    def handle(self) -> None:
        request = self.request.recv(65_536)
        echoed = b" ".join(request.split())
        if request.startswith((b"*", b"AUTH", b"HELLO")):
            self.request.sendall(b"-ERR unknown command, with args beginning with: " + echoed + b"\r\n")
        elif b"HTTP/1.1" in request:
            quoted = echoed.replace(b'"', b"'").replace(b"\\", b"/")
            body = b'{"__type": "SignatureDoesNotMatch", "message": "The request was: ' + quoted + b'"}'
            self.request.sendall(
                b"HTTP/1.1 403 No\r\nContent-Type: application/x-amz-json-1.0\r\nConnection: close\r\n"
            )
            self.request.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))


class _Server(ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Disconnected clients are expected and not reported."""


@contextmanager
def echo_server() -> Iterator[int]:
    """Run the server during the block and yield its port."""
    with _Server(("127.0.0.1", 0), _Echo) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def secret_fields(broker: str) -> list[str]:
    """Return the names of the fields of type `SecretStr`."""
    return [
        name
        for name, field in connection_model(broker).model_fields.items()
        if SecretStr in (field.annotation, *get_args(field.annotation))
    ]


def invalid_connections(broker: str, fields: Mapping[str, Any], secret: str) -> Iterator[dict[str, Any]]:
    """Yield connections with the secret in an unknown field, in fields of a wrong type, and in a plain address."""
    yield {**fields, "no_such_field": secret}
    yield from ({**fields, name: [secret]} for name in connection_model(broker).model_fields)
    if broker == "sqs":
        yield {**fields, "endpoint_url": f"https://app:{secret}@sqs.local"}


def make_connection(broker: str, secrets: Mapping[str, str], port: int) -> dict[str, Any]:
    """Return the fields of a connection that contains these secrets."""
    fields: dict[str, Any] = dict(OPTIONS[broker])
    for name, secret in secrets.items():
        plain = (
            f"{_SCHEMES[broker]}://app:{quote(secret, safe='')}@127.0.0.1:{port}" if name.endswith("url") else secret
        )
        fields[name] = plain
    if broker == "kafka":
        fields["bootstrap_servers"] = f"127.0.0.1:{port}"
    elif broker == "rabbitmq" and "url" not in secrets:
        fields |= {"host": "127.0.0.1", "port": port}
    elif broker == "redis" and "url" not in secrets:
        fields["url"] = f"redis://127.0.0.1:{port}"
    elif broker == "sqs" and "endpoint_url" not in secrets:
        fields["endpoint_url"] = f"http://127.0.0.1:{port}"
    return fields


def logged_texts(capture: LogCapture) -> Iterator[str]:
    """Yield every text that a formatter could write for the log records."""
    for _, record in capture.records:
        yield record.getMessage()
        yield str({name: value for name, value in vars(record).items() if name not in _STANDARD_ATTRIBUTES})
        if record.exc_info:
            yield "".join(traceback.format_exception(*record.exc_info))


def error_texts(exc: BaseException) -> Iterator[str]:
    """Yield every text that can be written for an error."""
    yield from ("".join(traceback.format_exception(exc)), repr(exc))


def assert_no_secrets(texts: Iterable[str], secrets: Iterable[str]) -> None:
    """Check that no text contains a secret, neither plain nor percent-encoded."""
    forms = {form for secret in secrets for form in (secret, quote(secret, safe=""), quote(secret), repr(secret)[1:-1])}
    for text in texts:
        found = [form for form in forms if form in text]
        assert not found, f"{found} in: {text}"
