"""The servers of a Redis topology: data nodes and sentinels, and how to send them commands.

Both keep their ports across restarts. Ports are below the ephemeral range, so that the port of a killed server is still
free when it restarts.
"""

from __future__ import annotations

import random
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Final

import hiredis

from holdfast.verification.chaos.servers import RedisServer

#: The name of the master in Sentinel.
SERVICE: Final = "holdfast"
_ANSWER_S: Final = 5.0
#: Offset of a node's cluster bus port from its client port.
_BUS: Final = 10_000
_PORTS: Final = (12_000, 22_000)


def call_redis(port: int, *command: str | int) -> Any:
    """Send one command on a new connection. Returns its reply; raises `OSError` or `hiredis.ReplyError`."""
    reader = hiredis.Reader(encoding="utf-8", errors="replace")
    with socket.create_connection(("127.0.0.1", port), timeout=_ANSWER_S) as connection:
        connection.sendall(hiredis.pack_command(command))  # type: ignore[arg-type]  # it takes any number
        while (reply := reader.gets()) is False:
            data = connection.recv(65536)
            if not data:
                raise ConnectionError(f"the server on port {port} closed the connection")
            reader.feed(data)
    if isinstance(reply, hiredis.ReplyError):
        raise reply
    return reply


class Node(RedisServer):
    """A data server whose port stays free while it is down."""

    def __init__(self, binary: Path, folder: Path, options: Mapping[str, str] | None = None) -> None:
        super().__init__(binary, folder, options)
        self.port = quiet_port()

    @property
    def runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def serves(self) -> bool:
        """Whether it runs and is not paused."""
        return self.runs and not self._paused

    def call(self, *command: str | int) -> Any:
        return call_redis(self.port, *command)

    def info(self, section: str) -> dict[str, str]:
        """One section of INFO, or CLUSTER INFO as section `cluster info`. Empty if it does not answer."""
        if self._paused:
            return {}
        words = ("CLUSTER", "INFO") if section == "cluster info" else ("INFO", section)
        try:
            lines = str(self.call(*words)).splitlines()
        except (OSError, hiredis.ReplyError):
            return {}
        return dict(line.split(":", 1) for line in lines if ":" in line)

    @property
    def is_master(self) -> bool:
        return self.info("replication").get("role") == "master"

    def is_replica_of(self, master: Node) -> bool:
        """Whether it replicates this master, in sync or not."""
        info = self.info("replication")
        return info.get("role") == "slave" and info.get("master_port") == str(master.port)

    def follows(self, master: Node) -> bool:
        """Whether it replicates this master and is in sync."""
        info = self.info("replication")
        in_sync = info.get("master_link_status") == "up" and info.get("master_sync_in_progress") == "0"
        return in_sync and self.is_replica_of(master)

    def disconnect_replicas(self) -> None:
        """Stop replication until the server restarts, without an effect on clients."""
        self.call("ACL", "SETUSER", "default", "-psync", "-sync")
        self.call("CLIENT", "KILL", "TYPE", "replica")


class Sentinel(Node):
    """A sentinel. It keeps its state in its configuration file, so that it survives restarts."""

    def __init__(self, binary: Path, folder: Path, master: Node, down_after_ms: int) -> None:
        super().__init__(binary, folder)
        self._master = master
        self._down_after_ms = down_after_ms

    def _launch(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        configuration = self.folder / "sentinel.conf"
        if not configuration.exists():
            configuration.write_text("\n".join(self._first_lines()) + "\n")
        command = [str(self.binary), str(configuration), "--sentinel"]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _first_lines(self) -> list[str]:
        return [
            f"port {self.port}",
            "bind 127.0.0.1",
            f"dir {self.folder}",
            f"sentinel monitor {SERVICE} 127.0.0.1 {self._master.port} 2",
            f"sentinel down-after-milliseconds {SERVICE} {self._down_after_ms}",
            # The next fail-over may start after twice this time.
            f"sentinel failover-timeout {SERVICE} 2000",
        ]

    def master_port(self) -> int:
        """Port of the master it names; 0 if it does not answer."""
        try:
            address = self.call("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)
        except (OSError, hiredis.ReplyError):
            return 0
        return int(address[1]) if address else 0

    def state(self) -> dict[str, str]:
        """The master's state as this sentinel reports it; empty if it does not answer."""
        try:
            words = self.call("SENTINEL", "MASTER", SERVICE)
        except (OSError, hiredis.ReplyError):
            return {}
        return dict(zip(words[::2], words[1::2], strict=True))


def quiet_port() -> int:
    """A free port whose cluster bus port (10,000 above) is free too."""
    for _ in range(1_000):
        port = random.randint(*_PORTS)
        if all(map(_is_free, (port, port + _BUS))):
            return port
    raise RuntimeError(f"no free pair of ports between {_PORTS[0]} and {_PORTS[1]}")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
