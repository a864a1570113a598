"""The example `knowledge_ingest` as it is deployed: every part a separate process, on real stores."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx

from holdfast.verification.chaos.servers import free_port
from tests.acceptance.workflow_deployment import EXAMPLES, TIMEOUT_S, wait_until
from tools.servers import MINILM, MINILM_TOKENS, find

FOLDER = EXAMPLES / "knowledge_ingest"
APP = f"{FOLDER / 'tasks.py'}:app"


class KnowledgeDeployment:
    """One deployment. The files of the model must be installed."""

    def __init__(self, folder: Path, redis_url: str, ledger_url: str, chroma_url: str, **settings: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.port = free_port()
        self._processes: list[subprocess.Popen[bytes]] = []
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("HOLDFAST_", "INGEST_"))},
            "PYTHONPATH": str(EXAMPLES),
            "HOLDFAST_URL": redis_url,
            "HOLDFAST_LEDGER": ledger_url,
            "HOLDFAST_METRICS_OPEN": "true",
            "CHROMA_BASE_URL": chroma_url,
            "MINILM_MODEL": str(find(MINILM)),
            "MINILM_TOKENIZER": str(find(MINILM_TOKENS)),
        } | settings

    # Processes -------------------------------------------------------------------------------------

    def start_web(self) -> None:
        arguments = [
            "knowledge_ingest.web:web",
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
            "--log-level",
            "warning",
        ]
        self._spawn("web", "-m", "uvicorn", *arguments)

    def start(self, *arguments: str, **settings: str) -> None:
        """Start a holdfast command that keeps running."""
        self._spawn(arguments[0], "-m", "holdfast", *arguments, **settings)

    def holdfast(self, *arguments: str) -> str:
        """Run a holdfast command to its end. Return its output."""
        command = [sys.executable, "-m", "holdfast", *arguments]
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def stop(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for log in sorted(self.folder.glob("*.log")):
            # pytest shows it if the test has failed.
            print(f"--- {log}\n{log.read_text(errors='replace')[-6000:]}")

    def _spawn(self, name: str, *arguments: str, **settings: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, *arguments],
                    cwd=self.folder,
                    env=self.environment | settings,
                    stdout=log,
                    stderr=log,
                )
            )

    # Clients ---------------------------------------------------------------------------------------

    def upload(self, text: str, **fields: str) -> dict[str, Any]:
        with self._client() as http:
            response = http.post("/api/knowledge/documents/upload-async", json={"text": text, **fields})
        assert response.status_code == 202, response.text
        accepted: dict[str, Any] = response.json()
        return accepted

    def task(self, task_id: str) -> dict[str, Any]:
        with self._client() as http:
            response = http.get(f"/api/knowledge/tasks/{task_id}")
        assert response.status_code == 200, response.text
        task: dict[str, Any] = response.json()
        return task

    def wait_status(self, task_id: str, status: str) -> dict[str, Any]:
        """Wait until the task has this status. Return the task."""

        def find_task() -> dict[str, Any] | None:
            task = self.task(task_id)
            return task if task["status"] == status else None

        found: dict[str, Any] = wait_until(find_task, f"the task to be {status}")
        return found

    def search(self, question: str) -> list[dict[str, Any]]:
        """Return the search results for a question, the best first."""
        response = self.get("/api/knowledge/search", q=question)
        assert response.status_code == 200, response.text
        results: list[dict[str, Any]] = response.json()["results"]
        return results

    def get(self, path: str, **parameters: str) -> httpx.Response:
        with self._client() as http:
            return http.get(path, params=parameters)

    def wait_for_web(self) -> None:
        wait_until(self._web_is_up, "the web server")

    def _client(self) -> httpx.Client:
        return httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=TIMEOUT_S, trust_env=False)

    def _web_is_up(self) -> bool:
        try:
            return self.get("/holdfast/readyz").status_code == 200
        except httpx.TransportError:
            return False
