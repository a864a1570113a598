"""The API behind ASGI servers other than `holdfast serve`, each a real process on loopback."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Final

import httpx
import msgspec
import pytest

from holdfast.http import create_api
from holdfast.http.service import Service
from holdfast.verification.chaos.servers import free_port
from tests.cli.harness import TIMEOUT_S, environment, eventually
from tests.http.deployment import sample

_APP: Final = """
import asyncio, json
from collections import Counter
from holdfast import Holdfast
from holdfast.http import create_api

app = Holdfast()
inner = create_api(app, dev=True, worker=True)
#: Requests that the API has not finished, by path.
open_requests = Counter()


@app.task
async def add(a: int, b: int = 1) -> int:
    return a + b


async def api(scope, receive, send):
    path = scope.get("path", "")
    if path == "/open":
        body = json.dumps(open_requests).encode()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": body})
        return
    open_requests[path] += 1
    try:
        await inner(scope, receive, send)
    finally:
        open_requests[path] -= 1
"""

_SERVERS: Final = {
    "uvicorn": ["uvicorn", "served:api", "--port", "{port}"],
    "hypercorn": ["hypercorn", "served:api", "--workers", "0", "--bind", "127.0.0.1:{port}"],
    "granian": ["granian", "served:api", "--interface", "asgi", "--port", "{port}"],
    "gunicorn": ["gunicorn", "served:api", "-k", "uvicorn_worker.UvicornWorker", "--bind", "127.0.0.1:{port}"],
}
_JOBS: Final = "/api/v1/jobs"
_STREAM: Final = "/api/v1/stream"
#: A job that no worker starts during the test.
_LATER: Final = {"task": "add", "payload": {"a": 1}, "delay_s": 3600}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", _SERVERS)
def test_the_api_behind_other_servers(name: str, tmp_path: Path) -> None:
    with _run_server(name, tmp_path) as (server, client), ThreadPoolExecutor(1) as thread:
        eventually(lambda: _is_ready(client, server), what=f"{name} to be ready")
        _submit_and_wait(client)
        _wait_for_less_than_the_job_takes(client)
        _disconnect(client, "POST", f"{_JOBS}?wait=60", msgspec.json.encode(_LATER))
        _disconnect(client, "GET", _STREAM)
        waiting = thread.submit(client.post, f"{_JOBS}?wait=60", json=_LATER)
        eventually(lambda: _is_open(client, _JOBS), what="a request that waits")
        with client.stream("GET", _STREAM) as stream:
            chunks = stream.iter_text()
            assert "event: ready" in next(chunks) + next(chunks)
            server.send_signal(signal.SIGTERM)
            assert waiting.result(TIMEOUT_S).status_code == 202
            list(chunks)
        # uvicorn ends by the signal itself.
        assert server.wait(TIMEOUT_S) in (0, -signal.SIGTERM)
    log = (tmp_path / "server.log").read_text()
    assert "Traceback" not in log, log


async def test_signals_are_handled_as_before_when_the_service_has_ended(tmp_path: Path) -> None:
    """The server's handler is called after the service's own; a default handler is kept."""
    app = sample(f"sqlite:///{tmp_path / 'jobs.db'}")
    service: Service = create_api(app, upkeep=False).state.service
    handled: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        handled.append(number)

    before = signal.signal(signal.SIGTERM, handler), signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        async with service.running():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
            signal.raise_signal(signal.SIGTERM)
            await asyncio.wait_for(service.ending.wait(), TIMEOUT_S)
        assert handled == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGINT, before[1])


def _submit_and_wait(client: httpx.Client) -> None:
    accepted = client.post(_JOBS, json=_LATER)
    assert accepted.status_code == 202
    assert client.get(accepted.headers["location"]).json()["state"] == "queued"
    job = client.post(f"{_JOBS}?wait=30", json={"task": "add", "payload": {"a": 1}})
    assert (job.status_code, job.json()["result"]) == (200, 2)
    with client.stream("GET", _STREAM, params={"job_id": job.json()["job_id"]}) as stream:
        assert "event: task.succeeded" in "".join(stream.iter_text())


def _wait_for_less_than_the_job_takes(client: httpx.Client) -> None:
    assert client.post(f"{_JOBS}?wait=0.1", json=_LATER).status_code == 202


def _disconnect(client: httpx.Client, method: str, target: str, body: bytes = b"") -> None:
    """Send a request and close the connection before the response; the request must end."""
    url = client.base_url
    lines = (f"{method} {target} HTTP/1.1", f"host: {url.host}:{url.port}", f"content-length: {len(body)}")
    head = "\r\n".join([*lines, "content-type: application/json", "", ""]).encode()
    path = target.partition("?")[0]
    with socket.create_connection((url.host, url.port or 80), timeout=TIMEOUT_S) as connection:
        connection.sendall(head + body)
        eventually(lambda: _is_open(client, path), what=f"a request to {path}")
    eventually(lambda: not _is_open(client, path), what=f"the end of a request to {path} whose client has disconnected")


def _is_open(client: httpx.Client, path: str) -> bool:
    """Whether the API has an unfinished request to this path."""
    return bool(client.get("/open").json().get(path))


def _is_ready(client: httpx.Client, server: subprocess.Popen[bytes]) -> bool:
    assert server.poll() is None, "the server has ended"
    try:
        return bool(client.get("/readyz").json()["ready"])
    except httpx.TransportError:
        return False


@contextmanager
def _run_server(name: str, folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], httpx.Client]]:
    """The server as a process, and a client of it; killed when the block is left, if it still runs."""
    (folder / "served.py").write_text(_APP)
    port = free_port()
    words = [word.format(port=port) for word in _SERVERS[name]]
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", *words],
            cwd=folder,
            env=environment(folder),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT_S, trust_env=False)
    try:
        with client:
            yield server, client
    finally:
        # With its workers.
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()
