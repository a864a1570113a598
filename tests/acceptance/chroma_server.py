"""A Chroma server for tests, and what is in it. Not started, it is a port at which nobody answers."""

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
    """`chroma run`, from the library that is all of it."""

    _ready_within_s = 30.0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        super().start()

    def count(self, collection: str = "knowledge") -> int:
        """How many records there are."""
        with self._client() as http:
            found = [each["id"] for each in http.get(_COLLECTIONS).json() if each["name"] == collection]
            return int(http.get(f"{_COLLECTIONS}/{found[0]}/count").text) if found else 0

    def records(self, document_id: str, collection: str = "knowledge") -> list[str]:
        """The texts of a document, in order of their ids."""
        with self._client() as http:
            [found] = [each["id"] for each in http.get(_COLLECTIONS).json() if each["name"] == collection]
            wanted: dict[str, Any] = {"where": {"document_id": document_id}, "include": ["documents"]}
            told = http.post(f"{_COLLECTIONS}/{found}/get", json=wanted).json()
        return [text for _, text in sorted(zip(told["ids"], told["documents"], strict=True))]

    def _client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=10, trust_env=False)

    def _launch(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        words = ["--path", str(self.folder / "data"), "--host", "127.0.0.1", "--port", str(self.port)]
        environment = {
            **os.environ,
            "HOME": str(self.folder),
            "PYTHONPATH": str(self.binary.parents[1]),
            "ANONYMIZED_TELEMETRY": "false",
        }
        # Coverage has no business in it.
        environment = {name: value for name, value in environment.items() if not name.startswith("COVERAGE_")}
        command = [sys.executable, "-S", "-c", _RUN, *words]
        return subprocess.Popen(
            command, env=environment, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )

    def _answers(self) -> bool:
        with self._client() as http:
            try:
                return http.get("/api/v2/heartbeat").status_code == 200
            except httpx.TransportError:
                return False
