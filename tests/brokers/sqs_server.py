"""SQS for tests: moto's server (see `serial_moto`), in a separate process. Its data is lost when the process ends.

`tests/conftest.py` imports the fixture.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

import pytest

from holdfast.verification.chaos.servers import ServerProcess

REGION: Final = "eu-central-1"
ACCESS_KEY: Final = "TESTKEYOFHOLDFAST"
SECRET_KEY: Final = "correct-horse-secret-battery"

_PROGRAM: Final = Path(__file__).with_name("serial_moto.py")


class SqsServer(ServerProcess):
    """moto. It accepts any credentials; with `strict` it accepts none."""

    _ready_within_s = 150.0

    def __init__(self, folder: Path, *, strict: bool = False) -> None:
        super().__init__(Path(sys.executable), folder)
        self._strict = strict

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        super().start()

    def _launch(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        # Without coverage: moto is not part of holdfast.
        environment = {key: value for key, value in os.environ.items() if not key.startswith("COV")}
        if self._strict:
            environment["INITIAL_NO_AUTH_ACTION_COUNT"] = "0"
        command = [str(self.binary), str(_PROGRAM), "-H", "127.0.0.1", "-p", str(self.port)]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
                connection.sendall(b"GET /moto-api/data.json HTTP/1.0\r\n\r\n")
                return connection.recv(64).startswith(b"HTTP/1")
        except OSError:
            return False


@pytest.fixture(scope="session")
def sqs_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SqsServer]:
    """A shared server; each test uses its own queues."""
    server = SqsServer(tmp_path_factory.mktemp("sqs") / "server")
    try:
        server.start()
        yield server
    finally:
        server.stop()
