"""`holdfast serve`, dev mode, and the API inside the user's own application (requirements H4, H6)."""

from __future__ import annotations

import asyncio
import gc
import re
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop
from fastapi import FastAPI, Request, Response

from holdfast.core.principal import Role
from holdfast.http import create_api, mount
from holdfast.http.server import HttpServer, bind
from holdfast.operations.queues import QueueOperations
from tests.cli.harness import SAMPLE_APP, Process, Shell, environment
from tests.http.deployment import Deployment, sample, serving


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    (tmp_path / "sample.py").write_text(SAMPLE_APP)
    return Shell(tmp_path, environment(tmp_path))


@contextmanager
def _serve(shell: Shell, *words: str) -> Iterator[tuple[Process, str]]:
    with shell.start("serve", *words, "--port", "0") as process:
        process.wait_log("serving ")
        found = re.search(r"on (http://127\.0\.0\.1:\d+)", process.log.read_text())
        assert found
        yield process, found.group(1)


def test_dev_needs_no_token_and_has_a_link_that_works_once(shell: Shell) -> None:
    with (
        _serve(shell, "sample.py:app", "--dev") as (process, base),
        httpx.Client(base_url=base, trust_env=False) as client,
    ):
        process.wait_log("/dev?key=")
        _wait_ready(client)
        job = client.post("/api/v1/jobs?wait=30", json={"task": "add", "payload": {"a": 1}})
        assert (job.status_code, job.json()["result"]) == (200, 2)
        # A page of another site, in a browser that has not used the link.
        cross_site = {"sec-fetch-site": "cross-site"}
        assert client.get("/api/v1/jobs", headers=cross_site).status_code == 401
        assert client.get("/api/v1/jobs", headers={"host": "evil.example"}).status_code == 401
        # Only the Referer shows that a page of another site sent it.
        body = {"task": "add", "payload": {"a": 1}}
        assert client.post("/api/v1/jobs", json=body, headers={"referer": "http://evil.example/"}).status_code == 401
        found = re.search(r"/dev\?key=\S+", process.log.read_text())
        assert found
        first = client.get(found.group())
        assert (first.status_code, first.headers["location"]) == (303, "./")
        assert "SameSite=Strict" in first.headers["set-cookie"]
        assert client.get("/api/v1/jobs", headers={"sec-fetch-site": "same-origin"}).status_code == 200
        assert client.get("/api/v1/jobs", headers=cross_site).status_code == 401
        assert client.get(found.group()).status_code == 410
        assert process.end() == 0


def test_a_waiting_request_is_answered_when_the_server_ends(shell: Shell) -> None:
    """202 with the location, at once: the job is accepted, although this process ends."""
    with _serve(shell, "sample.py:app", "--dev", "--no-worker") as (process, base), ThreadPoolExecutor(1) as thread:
        with httpx.Client(base_url=base, timeout=60, trust_env=False) as client:
            _wait_ready(client)
            body = {"task": "slow", "payload": {"seconds": 60}}
            waiting = thread.submit(client.post, "/api/v1/jobs?wait=60", json=body)
            while not shell.json("jobs", "list"):
                assert not waiting.done()
            started = time.monotonic()
            process.end()
            response = waiting.result(60)
        assert response.status_code == 202
        assert response.headers["location"].endswith(response.json()["job_id"])
        # Less than the grace time, after which the request would be cancelled.
        assert time.monotonic() - started < 9
        assert "Traceback" not in process.log.read_text()


def test_a_request_that_outlasts_the_grace_time_is_a_503(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A 503 for the client, and no traceback in the log."""
    monkeypatch.setattr("holdfast.http.server._GRACE_S", 0.2)
    called = threading.Event()

    async def hang(*_: Any, **__: Any) -> None:
        called.set()
        await asyncio.sleep(60)

    with ThreadPoolExecutor(1) as thread:
        with serving(sample(f"sqlite:///{tmp_path / 'jobs.db'}")) as deployment:
            bearer = {"authorization": f"Bearer {deployment.token()}"}
            monkeypatch.setattr(QueueOperations, "find", hang)
            waiting = thread.submit(httpx.get, f"{deployment.base}/api/v1/queues", headers=bearer, trust_env=False)
            assert called.wait(20)
        response = waiting.result(60)
    assert (response.status_code, response.json()["code"]) == (503, "ENGINE_UNAVAILABLE")
    assert "Traceback" not in caplog.text


def test_dev_listens_on_loopback_only(shell: Shell) -> None:
    done = shell.run("serve", "sample.py:app", "--dev", "--host", "0.0.0.0", code=2)
    assert "loopback" in done.stderr


def test_without_a_token_the_error_says_how_to_create_one(shell: Shell) -> None:
    done = shell.run("serve", "sample.py:app", "--host", "0.0.0.0", code=2)
    assert "holdfast token create" in done.stderr


def test_a_token_of_the_command_line_is_accepted(shell: Shell) -> None:
    made = shell.json("token", "create", "ada", "--role", "operator", "--all-tenants")
    with _serve(shell, "--no-upkeep") as (process, base), httpx.Client(base_url=base, trust_env=False) as client:
        assert client.get("/api/v1/jobs").status_code == 401
        client.headers["authorization"] = f"Bearer {made['token']}"
        assert client.get("/api/v1/jobs").status_code == 200
        # Without an app, and without a worker that has announced the task.
        assert client.post("/api/v1/jobs", json={"task": "whatever"}).status_code == 404
        assert client.post("/api/v1/jobs", json={"task": "whatever", "force": True}).status_code == 202
        assert client.get("/readyz").json()["worker"] == "none"
        assert process.end() == 0


def test_a_worker_needs_the_app(shell: Shell) -> None:
    assert "a worker needs an app" in shell.run("serve", "--dev", "--worker", code=2).stderr


def _wait_ready(client: httpx.Client) -> None:
    from tests.cli.harness import eventually

    eventually(lambda: client.get("/readyz").json()["ready"], what="the service to be ready")


def test_the_api_in_the_users_own_application(tmp_path: Path) -> None:
    """One line. The API starts and ends with the application, whose own lifespan still runs."""
    lifespan_events: list[str] = []

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> Any:
        lifespan_events.append("began")
        yield {"mine": 1}
        lifespan_events.append("ended")

    shop, app = FastAPI(lifespan=lifespan), sample(f"sqlite:///{tmp_path / 'jobs.db'}")

    @shop.get("/hello")
    async def hello() -> str:
        return "hello"

    inner = mount(shop, app, prefix="/tasks", worker=True)
    with serving(app, api=shop) as outer:
        deployment = Deployment(inner, outer.base, outer._loop)
        client = deployment.client("ada", Role.OPERATOR)
        assert client.get("/hello").json() == "hello"
        reply = client.post("/tasks/api/v1/jobs?wait=20", json={"task": "add", "payload": {"a": 1}})
        assert (reply.status_code, reply.json()["state"]) == (200, "succeeded")
        later = client.post("/tasks/api/v1/jobs", json={"task": "add", "payload": {"a": 1}, "delay_s": 60})
        assert later.headers["location"].startswith("/tasks/api/v1/jobs/")
        assert client.get(later.headers["location"]).status_code == 200
        deployment.close()
    assert lifespan_events == ["began", "ended"]


@pytest.mark.parametrize("prefix", ["", "/tasks"])
def test_middleware_sees_which_route_answers(tmp_path: Path, prefix: str) -> None:
    app, seen = sample(f"sqlite:///{tmp_path / 'jobs.db'}"), list[str]()
    shop = FastAPI()
    inner = mount(shop, app, prefix=prefix, worker=False) if prefix else create_api(app, worker=False)

    @inner.middleware("http")
    async def note_route(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        response = await call_next(request)
        seen.append(request.scope["route"].path if "route" in request.scope else "none")
        return response

    with serving(app, api=shop if prefix else inner) as outer:
        client = outer.anonymous()
        paths = ["/healthz", "/api/v1/jobs/bulk", "/api/v1/jobs/a%2Fb/events", "/api/v1%2Fjobs", "/api/v1/jobs/"]
        codes = [client.get(prefix + path).status_code for path in paths]
    assert seen == ["/healthz", "/api/v1/jobs/bulk", "/api/v1/jobs/{job_id}/events", "none", "none"]
    assert codes == [200, 405, 401, 404, 404]


def test_a_missing_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [
        name for name in sys.modules if name.partition(".")[0] == "fastapi" or name.startswith("holdfast.http")
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    with pytest.raises(ImportError, match=r"pip install 'holdfast\[http\]'"):
        import holdfast.http  # noqa: F401


@pytest.mark.filterwarnings("error::ResourceWarning")
@pytest.mark.parametrize("iterations", range(6))
@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_connection_during_shutdown_is_closed(loop: Callable[[], asyncio.AbstractEventLoop], iterations: int) -> None:
    """By the server, not by the garbage collector, which would warn."""
    connections: list[socket.socket] = []

    class BriefServer(HttpServer):
        """Ends a number of loop iterations after a client has connected."""

        async def main_loop(self) -> None:
            connections.append(socket.create_connection(self._socket.getsockname(), timeout=10))
            for _ in range(iterations):
                await asyncio.sleep(0)

    async def serve() -> None:
        with bind("127.0.0.1", 0) as sock:
            await BriefServer(FastAPI(), sock).run_until_stopped()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(serve())
    gc.collect()
    with connections[0] as connection, suppress(ConnectionResetError):
        assert connection.recv(1) == b""
