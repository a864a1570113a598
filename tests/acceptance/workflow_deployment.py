"""The example `workflow_apply` as it is deployed: a web server, workers, MongoDB and a model, each a process of its own
(the model: a thread), on real stores. Everything can be killed and brought back."""

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
PATIENCE_S = 90.0


def until(condition: Callable[[], Any], what: str) -> Any:
    """Wait for a condition, and fail loudly instead of hanging."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {PATIENCE_S:g} s for {what} in vain"
        time.sleep(0.03)
    return found


class Model:
    """A stand-in for a model that speaks OpenAI's protocol: it says what it was asked, backwards."""

    def __init__(self) -> None:
        self.prompts: list[str] = []
        #: Status of the next answers, in order; then 200.
        self.statuses: list[int] = []
        #: Cleared, it keeps callers waiting.
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
                asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
                assert self.path == "/v1/chat/completions"
                prompt = asked["messages"][0]["content"]
                model.prompts.append(prompt)
                model.open.wait(PATIENCE_S)
                status = model.statuses.pop(0) if model.statuses else 200
                said = {"choices": [{"message": {"role": "assistant", "content": prompt[::-1]}}]}
                body = json.dumps(said if status == 200 else {"error": {"message": "no"}}).encode()
                try:
                    self.send_response(status)
                    self.send_header("content-length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)
                except ConnectionError:
                    return  # the worker that asked is dead

            def log_message(self, *_: object) -> None:
                return

        return Handler

    def asked(self, prompts: Iterable[str]) -> int:
        """How often it was asked one of these."""
        wanted = set(prompts)
        return sum(prompt in wanted for prompt in self.prompts)


@dataclass(frozen=True)
class Stores:
    """Where a deployment keeps its jobs."""

    url: str
    ledger: str
    namespace: str


class World:
    """A deployment, and a client for each of its doors. Deployments may share a model and a MongoDB."""

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

    def spawn(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, *words], cwd=self.folder, env=self.environment, stdout=log, stderr=log
            )
        self._processes.append(process)
        return process

    def start_web(self) -> None:
        words = ["workflow_apply.web:web", "--host", "127.0.0.1", "--port", str(self.port), "--log-level", "warning"]
        self.spawn("web", "-m", "uvicorn", *words)

    def start_worker(self) -> None:
        """One, if none runs: `worker-1`, and `worker-2` after that one was killed."""
        if self._worker is None:
            self._workers += 1
            name = f"worker-{self._workers}"
            place = f"{EXAMPLES / 'workflow_apply' / 'tasks.py'}:app"
            self._worker = self.spawn(name, "-m", "holdfast", "worker", place, "--name", name)

    def kill_worker(self) -> None:
        assert self._worker is not None
        self._worker.kill()
        self._worker.wait()
        self._worker = None

    def token(self) -> str:
        """An operator's, made by the program."""
        if self._token is None:
            words = [sys.executable, "-m", "holdfast", "token", "create", "ops", "--role", "operator", "--all-tenants"]
            made = subprocess.run(words, cwd=self.folder, env=self.environment, capture_output=True, check=True)
            self._token = made.stdout.decode().strip()
        return self._token

    def print_logs(self) -> None:
        """The end of each; pytest shows it if the test has failed."""
        for log in sorted(self.folder.glob("*.log")):
            print(f"--- {log}\n{log.read_text(errors='replace')[-4000:]}")

    def tell_to_stop(self) -> None:
        for process in self._processes:
            process.terminate()

    def stop(self) -> None:
        self.tell_to_stop()
        for process in self._processes:
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    # Doors -----------------------------------------------------------------------------------------

    def caller(self) -> httpx.Client:
        return httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=PATIENCE_S, trust_env=False)

    def operator(self) -> httpx.Client:
        return httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}/holdfast",
            headers={"authorization": f"Bearer {self.token()}"},
            timeout=PATIENCE_S,
            trust_env=False,
        )

    def documents(self, *workflow_ids: str) -> list[dict[str, Any]]:
        with MongoClient[dict[str, Any]](self.environment["MONGO_URL"]) as client:
            return list(client.workflows.stages.find({"workflow_id": {"$in": workflow_ids}}))

    def wait_for_web(self) -> None:
        until(self._web_is_up, "the web server")

    def _web_is_up(self) -> bool:
        with self.caller() as http:
            try:
                return http.get("/holdfast/readyz").status_code == 200
            except httpx.TransportError:
                return False


@contextmanager
def deployed(folder: Path, beside: Stores, inside: Stores, **settings: str) -> Iterator[tuple[World, World]]:
    """Two deployments: one with a worker beside the web process, one with the worker in it (requirement H4). They start
    at the same time."""
    mongo, model = MongoServer(folder), Model()
    mongo.start()
    worlds = []
    try:
        for name, stores in (("beside", beside), ("inside", inside)):
            (folder / name).mkdir()
            own = settings | {"HOLDFAST_HTTP_WORKER": str(name == "inside").lower()}
            worlds.append(World(folder / name, stores, model, mongo, **own))
            worlds[-1].start_web()
        worlds[0].start_worker()
        yield worlds[0], worlds[1]
    finally:
        for world in worlds:
            world.tell_to_stop()
        for world in worlds:
            world.stop()
        mongo.kill()
        model.stop()
