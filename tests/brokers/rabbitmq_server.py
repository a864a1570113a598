"""A real RabbitMQ for tests: a separate node with its own port mapper, which ends with the test run.

`tests/conftest.py` imports the fixtures. Tests must not stop the shared broker; those that need to start a separate one
with `make_rabbitmq`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import subprocess
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from time import monotonic, sleep
from typing import IO, Final

import pytest

from holdfast.verification.chaos.servers import READY_WITHIN_S, ServerProcess, free_port
from tests.certificates import Certificates, make_certificates
from tests.servers import find_server
from tools.servers import RABBITMQ

MakeRabbit = Callable[..., "RabbitServer"]

USER: Final = "holdfast"
PASSWORD: Final = "correct-horse-9-battery"
#: A user who may connect but has no permissions.
STRANGER: Final = "stranger"

_POLL_S: Final = 0.02
_SALT: Final = b"salt"
#: Two scheduler threads without busy waiting: the tests need the processors.
_MACHINE: Final = "+S 2:2 +sbwt none +sbwtdcpu none +sbwtdio none -start_epmd false"


class RabbitServer(ServerProcess):
    """`rabbitmq-server`, plain and, with `tls`, on a second port with a certificate."""

    #: A start takes 6 s on an idle machine.
    _ready_within_s = 150.0

    def __init__(
        self,
        binary: Path,
        folder: Path,
        options: Mapping[str, str] | None = None,
        *,
        tls: Certificates | None = None,
    ) -> None:
        super().__init__(binary, folder, options)
        self.tls_port = free_port()
        self.tls = tls
        self._mapper_port = free_port()
        self._distribution_port = free_port()
        self._mapper: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"amqp://{USER}:{PASSWORD}@127.0.0.1:{self.port}/"

    def start(self) -> None:
        self._configure()
        if self._mapper is None:
            self._mapper = self._start_mapper()
        super().start()

    def wait_for_register(self, queue: str) -> None:
        """Wait until a new quorum queue survives a kill: the node writes its register half a second later."""
        (register,) = (self.folder / "data").glob("*/quorum/*/names.dets")
        deadline = monotonic() + READY_WITHIN_S
        while queue.encode() not in register.read_bytes():
            if monotonic() > deadline:
                raise TimeoutError(f"queue {queue} is not registered")
            sleep(_POLL_S)

    def remove(self) -> None:
        """Kill the server and its port mapper and delete their data. A graceful stop is not needed."""
        if self._process is not None:
            self.kill()
        if self._mapper is not None:
            self._mapper.kill()
            self._mapper.wait()
            self._mapper = None
        shutil.rmtree(self.folder, ignore_errors=True)

    def _configure(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        definitions = self.folder / "definitions.json"
        definitions.write_text(json.dumps(_definitions()))
        settings = {
            "listeners.tcp.1": f"127.0.0.1:{self.port}",
            "load_definitions": str(definitions),
            "loopback_users": "none",
            "disk_free_limit.absolute": "1MB",
            "log.console": "true",
            "log.console.level": "warning",
            "log.file": "false",
            "raft.wal_max_size_bytes": "16777216",
            **self._tls_settings(),
            **self.options,
        }
        (self.folder / "rabbitmq.conf").write_text("".join(f"{key} = {value}\n" for key, value in settings.items()))
        (self.folder / "enabled_plugins").write_text("[].\n")

    def _tls_settings(self) -> dict[str, str]:
        if self.tls is None:
            return {}
        ca, certificate, key = self.tls
        return {
            "listeners.ssl.1": f"127.0.0.1:{self.tls_port}",
            "ssl_options.cacertfile": str(ca),
            "ssl_options.certfile": str(certificate),
            "ssl_options.keyfile": str(key),
        }

    def _start_mapper(self) -> subprocess.Popen[bytes]:
        """Start Erlang's port mapper as a child process: one that a node starts itself never ends."""
        command = [*_kill_with_parent(), "epmd", "-port", str(self._mapper_port), "-address", "127.0.0.1"]
        with self._log_file.open("ab") as log:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment())

    def _launch(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        command = [*_kill_with_parent(), str(self.binary), "-noinput"]
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder, env=self._environment()
        )

    def _environment(self) -> dict[str, str]:
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("RABBITMQ_", "ERL_"))}
        return inherited | {
            "HOME": str(self.folder),
            "ERL_EPMD_PORT": str(self._mapper_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODENAME": f"test{self.port}@localhost",
            "RABBITMQ_DIST_PORT": str(self._distribution_port),
            "RABBITMQ_MNESIA_BASE": str(self.folder / "data"),
            "RABBITMQ_LOG_BASE": str(self.folder),
            "RABBITMQ_PID_FILE": str(self.folder / "pid"),
            "RABBITMQ_CONFIG_FILE": str(self.folder / "rabbitmq.conf"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.folder / "enabled_plugins"),
            "RABBITMQ_CONF_ENV_FILE": "/dev/null",
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": _MACHINE,
            # The script replaces itself with the Erlang VM instead of supervising it, so that signals reach the server.
            "RABBITMQ_ALLOW_INPUT": "true",
        }

    def _answers(self) -> bool:
        """Send the protocol header; the response must be a method frame."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=2) as connection:
                connection.sendall(b"AMQP\x00\x00\x09\x01")
                return connection.recv(1) == b"\x01"
        except OSError:
            return False


def _kill_with_parent() -> list[str]:
    """Return a command prefix that ends the child with the thread that starts it, however the run ends."""
    return ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []


def _definitions() -> dict[str, object]:
    everything, nothing = ".*", "^$"
    return {
        "vhosts": [{"name": "/"}],
        "users": [
            {
                "name": name,
                "password_hash": b64encode(_SALT + hashlib.sha256(_SALT + PASSWORD.encode()).digest()).decode(),
                "hashing_algorithm": "rabbit_password_hashing_sha256",
                "tags": "",
            }
            for name in (USER, STRANGER)
        ],
        "permissions": [
            {"user": name, "vhost": "/", "configure": pattern, "write": pattern, "read": pattern}
            for name, pattern in ((USER, everything), (STRANGER, nothing))
        ],
    }


@pytest.fixture(scope="session")
def rabbitmq_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RabbitServer]:
    """A shared broker, with TLS on its second port; each test uses its own queues."""
    folder = tmp_path_factory.mktemp("rabbitmq")
    server = RabbitServer(find_server(RABBITMQ), folder / "node", tls=make_certificates(folder / "tls"))
    try:
        server.start()
        yield server
    finally:
        server.remove()


@pytest.fixture
def make_rabbitmq(tmp_path: Path) -> Iterator[MakeRabbit]:
    """Start brokers that only this test uses and may stop: `make_rabbitmq(tls=make_certificates(folder))`."""
    made: list[RabbitServer] = []

    def make(*, tls: Certificates | None = None, **options: str) -> RabbitServer:
        fresh = RabbitServer(find_server(RABBITMQ), tmp_path / f"rabbitmq-{len(made)}", options, tls=tls)
        made.append(fresh)
        fresh.start()
        return fresh

    yield make
    for server in made:
        server.remove()
