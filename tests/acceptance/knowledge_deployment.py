"""The example `knowledge_ingest` as it is deployed: every part a process of its own, on real stores."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx

from holdfast.verification.chaos.servers import free_port
from tests.acceptance.workflow_deployment import EXAMPLES, PATIENCE_S, until
from tools.servers import MINILM, MINILM_TOKENS, find

FOLDER = EXAMPLES / "knowledge_ingest"
APP = f"{FOLDER / 'tasks.py'}:app"


class Knowledge:
    """One deployment. The files of the model have to be there."""

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
        words = ["knowledge_ingest.web:web", "--host", "127.0.0.1", "--port", str(self.port), "--log-level", "warning"]
        self._spawn("web", "-m", "uvicorn", *words)

    def start(self, *words: str, **settings: str) -> None:
        """One of holdfast's commands that stay."""
        self._spawn(words[0], "-m", "holdfast", *words, **settings)

    def holdfast(self, *words: str) -> str:
        """What a command that ends has said."""
        command = [sys.executable, "-m", "holdfast", *words]
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

    def _spawn(self, name: str, *words: str, **settings: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, *words], cwd=self.folder, env=self.environment | settings, stdout=log, stderr=log
                )
            )

    # Doors -----------------------------------------------------------------------------------------

    def upload(self, text: str, **about: str) -> dict[str, Any]:
        with self._client() as http:
            answer = http.post("/api/knowledge/documents/upload-async", json={"text": text, **about})
        assert answer.status_code == 202, answer.text
        accepted: dict[str, Any] = answer.json()
        return accepted

    def task(self, task_id: str) -> dict[str, Any]:
        with self._client() as http:
            answer = http.get(f"/api/knowledge/tasks/{task_id}")
        assert answer.status_code == 200, answer.text
        told: dict[str, Any] = answer.json()
        return told

    def reach(self, task_id: str, status: str) -> dict[str, Any]:
        """The task, once it is there."""

        def there() -> dict[str, Any] | None:
            told = self.task(task_id)
            return told if told["status"] == status else None

        found: dict[str, Any] = until(there, f"the task to be {status}")
        return found

    def answers(self, question: str) -> list[dict[str, Any]]:
        """What is found for a question, the best first."""
        answer = self.get("/api/knowledge/search", q=question)
        assert answer.status_code == 200, answer.text
        results: list[dict[str, Any]] = answer.json()["results"]
        return results

    def get(self, path: str, **parameters: str) -> httpx.Response:
        with self._client() as http:
            return http.get(path, params=parameters)

    def wait_for_web(self) -> None:
        until(self._web_is_up, "the web server")

    def _client(self) -> httpx.Client:
        return httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=PATIENCE_S, trust_env=False)

    def _web_is_up(self) -> bool:
        try:
            return self.get("/holdfast/readyz").status_code == 200
        except httpx.TransportError:
            return False
