"""A Chroma server for tests, with access to its records. Before it is started, its port is closed."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import IO, Any

import httpx

from holdfast.verification.chaos.servers import ServerProcess

_RUN = "import sys, chromadb_rust_bindings; chromadb_rust_bindings.cli(['chroma', 'run', *sys.argv[1:]])"
_COLLECTIONS = "/api/v2/tenants/default_tenant/databases/default_database/collections"


class ChromaServer(ServerProcess):
    """`chroma run`, from the library that contains the whole server."""

    _ready_within_s = 150.0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        super().start()

    def count(self, collection: str = "knowledge") -> int:
        """Count the records of a collection."""
        with self._client() as http:
            found = [each["id"] for each in http.get(_COLLECTIONS).json() if each["name"] == collection]
            return int(http.get(f"{_COLLECTIONS}/{found[0]}/count").text) if found else 0

    def records(self, document_id: str, collection: str = "knowledge") -> list[str]:
        """Return the texts of a document, in order of their ids."""
        with self._client() as http:
            [found] = [each["id"] for each in http.get(_COLLECTIONS).json() if each["name"] == collection]
            query: dict[str, Any] = {"where": {"document_id": document_id}, "include": ["documents"]}
            response = http.post(f"{_COLLECTIONS}/{found}/get", json=query).json()
        return [text for _, text in sorted(zip(response["ids"], response["documents"], strict=True))]

    def _client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=10, trust_env=False)

    def _launch(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        options = ["--path", str(self.folder / "data"), "--host", "127.0.0.1", "--port", str(self.port)]
        environment = {
            **os.environ,
            "HOME": str(self.folder),
            "PYTHONPATH": str(self.binary.parents[1]),
            "ANONYMIZED_TELEMETRY": "false",
        }
        # The server must not record coverage.
        environment = {name: value for name, value in environment.items() if not name.startswith("COVERAGE_")}
        command = [sys.executable, "-S", "-c", _RUN, *options]
        return subprocess.Popen(
            command, env=environment, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )

    def _answers(self) -> bool:
        with self._client() as http:
            try:
                return http.get("/api/v2/heartbeat").status_code == 200
            except httpx.TransportError:
                return False
