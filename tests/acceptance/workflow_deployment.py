"""The example `workflow_apply` as it is deployed: a web server, workers, MongoDB and a model, on real stores.

Each part is a separate process (the model: a thread) that tests can kill and restart.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
from pymongo import MongoClient

from holdfast.verification.chaos.servers import free_port
from tests.effects.test_mongo import MongoServer

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
TIMEOUT_S = 90.0


def wait_until(condition: Callable[[], Any], what: str) -> Any:
    """Wait for a condition. Fails after `TIMEOUT_S`."""
    deadline = time.monotonic() + TIMEOUT_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"timed out after {TIMEOUT_S:g} s waiting for {what}"
        time.sleep(0.03)
    return found


class Model:
    """A fake model with OpenAI's protocol: it returns the prompt reversed."""

    def __init__(self) -> None:
        self.prompts: list[str] = []
        #: Status of the next responses, in order; then 200.
        self.statuses: list[int] = []
        #: While it is cleared, callers wait.
        self.open = threading.Event()
        self.open.set()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="model", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/v1"

    def stop(self) -> None:
        self.open.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        model = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["content-length"])))
                assert self.path == "/v1/chat/completions"
                prompt = request["messages"][0]["content"]
                model.prompts.append(prompt)
                model.open.wait(TIMEOUT_S)
                status = model.statuses.pop(0) if model.statuses else 200
                completion = {"choices": [{"message": {"role": "assistant", "content": prompt[::-1]}}]}
                body = json.dumps(completion if status == 200 else {"error": {"message": "no"}}).encode()
                try:
                    self.send_response(status)
                    self.send_header("content-length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)
                except ConnectionError:
                    return  # the calling worker was killed

            def log_message(self, *_: object) -> None:
                return

        return Handler

    def count_calls(self, prompts: Iterable[str]) -> int:
        """Count the calls with one of these prompts."""
        counted = set(prompts)
        return sum(prompt in counted for prompt in self.prompts)


@dataclass(frozen=True)
class Stores:
    """The stores of a deployment."""

    url: str
    ledger: str
    namespace: str


class WorkflowDeployment:
    """A deployment with its HTTP clients. Deployments can share a model and a MongoDB."""

    def __init__(self, folder: Path, stores: Stores, model: Model, mongo: MongoServer, **settings: str) -> None:
        self.folder = folder
        self.model = model
        self.mongo = mongo
        self.port = free_port()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._worker: subprocess.Popen[bytes] | None = None
        self._workers = 0
        self._token: str | None = None
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")},
            "PYTHONPATH": str(EXAMPLES),
            "HOLDFAST_URL": stores.url,
            "HOLDFAST_LEDGER": stores.ledger,
            "HOLDFAST_NAMESPACE": stores.namespace,
            "HOLDFAST_VISIBILITY_TIMEOUT_S": "2",
            "HOLDFAST_HEARTBEAT_INTERVAL_S": "0.5",
            "OPENAI_BASE_URL": self.model.url,
            "MONGO_URL": f"mongodb://127.0.0.1:{self.mongo.port}",
            "WORKFLOW_RETRY_DELAYS": "0.2,0.2",
        } | settings

    # Processes -------------------------------------------------------------------------------------

    def spawn(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, *arguments], cwd=self.folder, env=self.environment, stdout=log, stderr=log
            )
        self._processes.append(process)
        return process

    def start_web(self) -> None:
        arguments = [
            "workflow_apply.web:web",
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
            "--log-level",
            "warning",
        ]
        self.spawn("web", "-m", "uvicorn", *arguments)

    def start_worker(self) -> None:
        """Start a worker if none runs: `worker-1`, or `worker-2` after that one was killed."""
        if self._worker is None:
            self._workers += 1
            name = f"worker-{self._workers}"
            app_location = f"{EXAMPLES / 'workflow_apply' / 'tasks.py'}:app"
            self._worker = self.spawn(name, "-m", "holdfast", "worker", app_location, "--name", name)

    def kill_worker(self) -> None:
        assert self._worker is not None
        self._worker.kill()
        self._worker.wait()
        self._worker = None

    def token(self) -> str:
        """Return an operator's token, created by the CLI."""
        if self._token is None:
            arguments = [
                sys.executable,
                "-m",
                "holdfast",
                "token",
                "create",
                "ops",
                "--role",
                "operator",
                "--all-tenants",
            ]
            made = subprocess.run(arguments, cwd=self.folder, env=self.environment, capture_output=True, check=True)
            self._token = made.stdout.decode().strip()
        return self._token

    def print_logs(self) -> None:
        """Print the end of each log; pytest shows it if the test has failed."""
        for log in sorted(self.folder.glob("*.log")):
            print(f"--- {log}\n{log.read_text(errors='replace')[-4000:]}")

    def terminate(self) -> None:
        for process in self._processes:
            process.terminate()

    def stop(self) -> None:
        self.terminate()
        for process in self._processes:
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    # Clients ---------------------------------------------------------------------------------------

    def caller(self) -> httpx.Client:
        return httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=TIMEOUT_S, trust_env=False)

    def operator(self) -> httpx.Client:
        return httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}/holdfast",
            headers={"authorization": f"Bearer {self.token()}"},
            timeout=TIMEOUT_S,
            trust_env=False,
        )

    def documents(self, *workflow_ids: str) -> list[dict[str, Any]]:
        with MongoClient[dict[str, Any]](self.environment["MONGO_URL"]) as client:
            return list(client.workflows.stages.find({"workflow_id": {"$in": workflow_ids}}))

    def wait_for_web(self) -> None:
        wait_until(self._web_is_up, "the web server")

    def _web_is_up(self) -> bool:
        with self.caller() as http:
            try:
                return http.get("/holdfast/readyz").status_code == 200
            except httpx.TransportError:
                return False


@contextmanager
def run_deployments(
    folder: Path, separate: Stores, in_web: Stores, **settings: str
) -> Iterator[tuple[WorkflowDeployment, WorkflowDeployment]]:
    """Run two deployments: one with a separate worker, one with the worker in the web process (requirement H4).

    They start at the same time.
    """
    mongo, model = MongoServer(folder), Model()
    mongo.start()
    deployments = []
    try:
        for name, stores in (("separate", separate), ("in_web", in_web)):
            (folder / name).mkdir()
            own_settings = settings | {"HOLDFAST_HTTP_WORKER": str(name == "in_web").lower()}
            deployments.append(WorkflowDeployment(folder / name, stores, model, mongo, **own_settings))
            deployments[-1].start_web()
        deployments[0].start_worker()
        yield deployments[0], deployments[1]
    finally:
        for deployment in deployments:
            deployment.terminate()
        for deployment in deployments:
            deployment.stop()
        mongo.kill()
        model.stop()
