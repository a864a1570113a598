"""Scraping as Prometheus does it, and a receiver of spans."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.parser import text_string_to_metric_families

from holdfast import Holdfast
from holdfast.observe.prometheus import serve_metrics
from holdfast.operations.metrics import render_metrics

TIMEOUT_S: Final = 60.0


async def fetch(port: int, path: str = "/metrics", method: str = "GET") -> tuple[str, str]:
    """Head and body of the response, over a socket."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    response = (await reader.read()).decode()
    writer.close()
    head, _, body = response.partition("\r\n\r\n")
    return head, body


def samples(text: str) -> dict[str, float]:
    """`name{label="value",…}` (without the prefix, labels sorted) → value."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
            name = sample.name.removeprefix("holdfast_")
            found[f"{name}{{{labels}}}" if labels else name] = sample.value
    return found


async def scrape(app: Holdfast) -> dict[str, float]:
    """What Prometheus would get from this app's process."""
    async with serve_metrics("127.0.0.1", 0, lambda: render_metrics(app)) as port:
        head, body = await fetch(port)
    assert head.startswith("HTTP/1.1 200 OK")
    return samples(body)


async def eventually(check: Callable[[], Awaitable[Any]], what: str) -> Any:
    """Wait until `check` returns a true value, and return it."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        if result := await check():
            return result
        await asyncio.sleep(0.02)
    raise AssertionError(f"waited {TIMEOUT_S:g} s for {what}")


class SpanReceiver:
    """Receives spans by OTLP over HTTP, as a collector does."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.services: set[str] = set()

    def receive(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.services |= {
                each.value.string_value for each in resource.resource.attributes if each.key == "service.name"
            }
            for scope in resource.scope_spans:
                self.spans += scope.spans

    def wait(self, number: int) -> list[Any]:
        """Wait for this number of spans; return them in the order in which they started."""
        for _ in range(round(TIMEOUT_S / 0.05)):
            if len(self.spans) >= number:
                break
            threading.Event().wait(0.05)
        assert len(self.spans) == number, [span.name for span in self.spans]
        return sorted(self.spans, key=lambda span: span.start_time_unix_nano)


@contextmanager
def run_span_receiver() -> Iterator[tuple[SpanReceiver, str]]:
    """A receiver on loopback, and its address."""
    receiver = SpanReceiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            receiver.receive(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Keep stderr clean."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield receiver, f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def attributes(span: Any) -> dict[str, Any]:
    """A span's attributes, as plain values."""
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}
