"""A real Kafka broker for tests: one node that is broker and controller, with settings for a quick start.

`tests/conftest.py` imports the fixtures. Tests must not stop the shared broker; those that need to start a separate one
with `make_kafka`.
"""

from __future__ import annotations

import shutil
import socket
import struct
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Final

import pytest

from holdfast.verification.chaos.servers import ServerProcess, free_port
from tests.servers import find_server
from tools.servers import KAFKA

MakeKafka = Callable[..., "KafkaServer"]

#: Credentials of the second listener, which uses SASL/PLAIN.
SASL_USER: Final = "holdfast"
SASL_PASSWORD: Final = "correct-horse-battery"

_CLUSTER: Final = "aG9sZGZhc3QtdGVzdHMtMQ"
#: A broker starts once and runs for a minute: the first compiler tier is enough.
_JVM: Final = ("-Xms96m", "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto")


class KafkaServer(ServerProcess):
    """`kafka.Kafka` in KRaft mode. Topics are created on first use, with two partitions."""

    #: A JVM starts slowly on a busy machine.
    _ready_within_s = 150.0

    def __init__(self, jar: Path, folder: Path, options: Mapping[str, str] | None = None) -> None:
        super().__init__(jar, folder, options)
        self.sasl_port = free_port()
        self._controller_port = free_port()

    @property
    def address(self) -> str:
        """Value for `bootstrap_servers`."""
        return f"127.0.0.1:{self.port}"

    @property
    def sasl_address(self) -> str:
        """Address of the listener that requires a password."""
        return f"127.0.0.1:{self.sasl_port}"

    def start(self) -> None:
        if not self.folder.exists():
            self._format()
        super().start()

    def remove(self) -> None:
        """Kill the server and delete its data. A graceful stop is not needed, since no data is kept."""
        if self._process is not None:
            self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _format(self) -> None:
        self.folder.mkdir(parents=True)
        self._properties.write_text("".join(f"{key}={value}\n" for key, value in self._settings().items()))
        args = ["format", "-t", _CLUSTER, "-c", str(self._properties)]
        with self._log_file.open("ab") as log:
            done = subprocess.run(self._java("kafka.tools.StorageTool", *args), stdout=log, stderr=log, check=False)
        if done.returncode:
            raise RuntimeError(f"StorageTool ended with {done.returncode}\n{self._log()}")

    def _launch(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        # The JVM must not outlive the test run, however that ends: it ends with the thread that started it.
        tie = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        command = [*tie, *self._java("kafka.Kafka", str(self._properties))]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder)

    def _answers(self) -> bool:
        """Send a metadata request; the response must name a broker."""
        request = struct.pack(">hhih", 3, 1, 1, -1) + struct.pack(">i", 0)
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=2) as connection:
                connection.sendall(struct.pack(">i", len(request)) + request)
                response = connection.recv(12, socket.MSG_WAITALL)
        except OSError:
            return False
        return len(response) == 12 and int.from_bytes(response[8:]) > 0

    @property
    def _properties(self) -> Path:
        return self.folder / "server.properties"

    def _java(self, name: str, *args: str) -> list[str]:
        return ["java", *_JVM, "-cp", f"{self.binary.parent}/*", name, *args]

    def _settings(self) -> dict[str, str]:
        plain, sasl, controller = (
            f"{name}://127.0.0.1:{port}"
            for name, port in (("PLAIN", self.port), ("SASL", self.sasl_port), ("CONTROLLER", self._controller_port))
        )
        login = "org.apache.kafka.common.security.plain.PlainLoginModule"
        return {
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.voters": f"1@127.0.0.1:{self._controller_port}",
            "controller.listener.names": "CONTROLLER",
            "listeners": f"{plain},{sasl},{controller}",
            "advertised.listeners": f"{plain},{sasl}",
            "listener.security.protocol.map": "PLAIN:PLAINTEXT,SASL:SASL_PLAINTEXT,CONTROLLER:PLAINTEXT",
            "inter.broker.listener.name": "PLAIN",
            "listener.name.sasl.sasl.enabled.mechanisms": "PLAIN",
            "listener.name.sasl.plain.sasl.jaas.config": f'{login} required user_{SASL_USER}="{SASL_PASSWORD}";',
            "log.dirs": str(self.folder / "data"),
            "num.partitions": "2",
            "offsets.topic.num.partitions": "4",
            "offsets.topic.replication.factor": "1",
            "transaction.state.log.num.partitions": "2",
            "transaction.state.log.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
            "group.initial.rebalance.delay.ms": "0",
            "group.min.session.timeout.ms": "1000",
            "log.segment.bytes": "67108864",
            "num.network.threads": "2",
            "num.io.threads": "2",
            "background.threads": "2",
            "log.cleaner.dedupe.buffer.size": "4194304",
            # A restarted broker must not be treated as dead for long.
            "broker.session.timeout.ms": "3000",
            "broker.heartbeat.interval.ms": "500",
            "controlled.shutdown.enable": "false",
            **self.options,
        }


@pytest.fixture(scope="session")
def kafka_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaServer]:
    """A shared broker; each test uses its own topics and groups."""
    server = KafkaServer(find_server(KAFKA), tmp_path_factory.mktemp("kafka") / "node")
    try:
        server.start()
        yield server
    finally:
        server.remove()


@pytest.fixture
def make_kafka(tmp_path: Path) -> Iterator[MakeKafka]:
    """Start brokers that only this test uses and may stop: `make_kafka(num_partitions="4")`."""
    made: list[KafkaServer] = []

    def make(**options: str) -> KafkaServer:
        settings = {key.replace("_", "."): value for key, value in options.items()}
        fresh = KafkaServer(find_server(KAFKA), tmp_path / f"kafka-{len(made)}", settings)
        made.append(fresh)
        fresh.start()
        return fresh

    yield make
    for server in made:
        server.remove()
