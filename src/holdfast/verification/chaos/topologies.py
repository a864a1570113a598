"""Redis topologies: a single server, Sentinel, Cluster.

Each consists of real servers on their own ports, which can be killed one by one, failed over and healed. Methods block
until they are done, with a timeout: `start` until clients are served and replicas are in sync, `fail_over` until
another server is master, `heal` until all servers run and have rejoined.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from math import inf
from pathlib import Path
from time import monotonic, sleep
from typing import Any, ClassVar, Final

import hiredis

from holdfast.verification.chaos.redis_nodes import SERVICE, Node, Sentinel, call_redis
from holdfast.verification.chaos.servers import ServerProcess, find_redis

#: How long a fail-over, a heal or a start may take; on a busy machine elections are repeated.
TIMEOUT_S: Final = 60.0
_SLOTS: Final = 16384
_POLL_S: Final = 0.02
#: Redis aborts a planned fail-over after 5 s.
_HANDED_OVER_WITHIN_S: Final = 6.0
#: Fields of a row of CLUSTER NODES before the slots, minus the three that are read.
_BEFORE_SLOTS: Final = 5
#: A replica begins its sync immediately instead of waiting for others to join it.
_COMMON: Final[Mapping[str, str]] = {"repl-diskless-sync-delay": "0", "repl-ping-replica-period": "1"}
_AOF: Final[Mapping[str, str]] = {"appendonly": "yes", "appendfsync": "everysec"}


class Topology(ABC):
    """Redis servers that form one store."""

    name: ClassVar[str]
    #: Whether there are replicas to promote.
    can_fail_over: bool = True

    def __init__(
        self,
        folder: Path,
        *,
        binary: Path | None = None,
        aof: bool = False,
        options: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self.binary = binary or find_redis()
        self._options = {**_COMMON, **(_AOF if aof else {}), **(options or {})}
        #: All its processes by name: `redis`, `redis-2`, …, `sentinel-1`, …
        self.servers: dict[str, ServerProcess] = {}

    @property
    @abstractmethod
    def url(self) -> str:
        """The value of HOLDFAST_URL."""

    @abstractmethod
    def start(self) -> None:
        """Start all servers; returns when clients are served and replicas are in sync."""

    @abstractmethod
    def masters(self) -> list[str]:
        """Names of the servers that accept writes."""

    @abstractmethod
    def fail_over(self, *, kill: bool = True, target: str | None = None) -> str:
        """Promote a replica of a master (of `target`). Returns the name of the new master.

        With `kill` the master is killed with kill -9 and stays down until `heal`; otherwise the fail-over is planned.
        """

    @abstractmethod
    def hang(self, target: str) -> str:
        """Pause a master until a replica is promoted. Returns the name of the new master.

        The old one stays paused until it is resumed.
        """

    @abstractmethod
    def heal(self) -> None:
        """Start or resume all processes and wait until they have rejoined."""

    def stop(self) -> None:
        """Stop all servers. Safe to call when none runs."""
        for server in reversed(self.servers.values()):
            server.stop()

    def wipe(self) -> None:
        """Delete all data, as an accidental FLUSHALL does."""
        for name in self.masters():
            self.node(name).call("FLUSHALL")

    def node(self, name: str) -> Node:
        """A server by name."""
        server = self.servers[name]
        assert isinstance(server, Node)
        return server

    def nodes(self) -> dict[str, Node]:
        """All data servers, running or not."""
        found = {name: self.node(name) for name in self.servers}
        return {name: node for name, node in found.items() if not isinstance(node, Sentinel)}

    def _add(self, number: int, **options: str) -> Node:
        name = "redis" if number == 1 else f"redis-{number}"
        arguments = {**self._options, **{key.replace("_", "-"): value for key, value in options.items()}}
        node = Node(self.binary, self.folder / name, arguments)
        self.servers[name] = node
        return node

    def _revive(self) -> None:
        for server in self.servers.values():
            assert isinstance(server, Node)
            server.resume() if server.runs else server.start()

    def _wait(self, condition: Callable[[], Any], what: str) -> Any:
        """Poll `condition` until it is true. Returns its value."""
        deadline = monotonic() + TIMEOUT_S
        while not (value := condition()):
            if monotonic() > deadline:
                raise TimeoutError(f"{self.name}: waited {TIMEOUT_S:g} s for {what}; see the logs in {self.folder}")
            sleep(_POLL_S)
        return value


class SingleRedis(Topology):
    """One server. While it is down, clients wait."""

    name = "single"
    can_fail_over = False

    def __init__(self, folder: Path, **settings: Any) -> None:
        super().__init__(folder, **settings)
        self._only = self._add(1)

    @property
    def url(self) -> str:
        return self._only.url

    def start(self) -> None:
        self._only.start()

    def masters(self) -> list[str]:
        return ["redis"]

    def fail_over(self, *, kill: bool = True, target: str | None = None) -> str:
        raise RuntimeError("a single Redis has no replica to fail over to; use Sentinel or Cluster")

    def hang(self, target: str) -> str:
        return self.fail_over(target=target)

    def heal(self) -> None:
        self._revive()
        self._wait(lambda: self._only.info("persistence").get("loading") == "0", "the data to load")


class SentinelRedis(Topology):
    """A master with a replica, and three sentinels with a quorum of two.

    Sentinels ping once a second. With a timeout much shorter than 1.5 s they consider a newly discovered master down
    and fail over back and forth.
    """

    name = "sentinel"

    def __init__(self, folder: Path, *, down_after_ms: int = 1_500, **settings: Any) -> None:
        super().__init__(folder, **settings)
        first, self._down_after_ms = self._add(1), down_after_ms
        self._add(2)
        self._sentinels = [
            Sentinel(self.binary, folder / f"sentinel-{number}", first, down_after_ms) for number in (1, 2, 3)
        ]
        self.servers |= {f"sentinel-{number}": server for number, server in enumerate(self._sentinels, 1)}

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self._sentinels)
        return f"redis+sentinel://{hosts}/{SERVICE}/0"

    def start(self) -> None:
        for node in self.nodes().values():
            node.start()
        self._follow("redis")
        # Only now: a sentinel adopts the replication that it finds.
        self._wait(lambda: self.node("redis-2").follows(self.node("redis")), "the replica to be in sync")
        for sentinel in self._sentinels:
            sentinel.start()
        self._wait(self._is_complete, "the sentinels to know each other and the replica")

    def masters(self) -> list[str]:
        """The master that a majority of the sentinels names."""
        votes = [sentinel.master_port() for sentinel in self._sentinels if sentinel.runs]
        return [name for name, node in self.nodes().items() if votes.count(node.port) * 2 > len(self._sentinels)]

    def fail_over(self, *, kill: bool = True, target: str | None = None) -> str:
        old = target or self._wait(self.masters, "the sentinels to agree on a master")[0]
        if kill:
            self.node(old).kill()
        else:
            self._wait(self._request_fail_over, "a sentinel to accept the planned fail-over")
        return str(self._wait(lambda: self._successor(old), f"a master other than {old}"))

    def hang(self, target: str) -> str:
        self.node(target).pause()
        return str(self._wait(lambda: self._successor(target), f"a master other than {target}"))

    def heal(self) -> None:
        self._revive()
        self._wait(self._rejoin, "all servers to rejoin")

    def _successor(self, old: str) -> str | None:
        found = [name for name in self.masters() if name != old]
        return found[0] if found and self.node(found[0]).is_master else None

    def _request_fail_over(self) -> bool:
        """Request a planned fail-over. False: refused, for lack of a healthy replica or during another one."""
        with suppress(OSError, hiredis.ReplyError):
            self._sentinels[0].call("SENTINEL", "FAILOVER", SERVICE)
            return True
        return False

    def _rejoin(self) -> bool:
        masters = self.masters()
        settled = all(sentinel.state().get("flags") == "master" for sentinel in self._sentinels)
        if masters and settled and self.node(masters[0]).is_master:
            # A sentinel would also demote a returned master, but only after 10 s.
            self._follow(masters[0])
        return self._is_complete()

    def _follow(self, master: str) -> None:
        other = self.node(self._other(master))
        if other.info("replication").get("master_port") != str(self.node(master).port):
            other.call("REPLICAOF", "127.0.0.1", self.node(master).port)

    def _other(self, name: str) -> str:
        return next(other for other in self.nodes() if other != name)

    def _is_complete(self) -> bool:
        masters = self.masters()
        if len(masters) != 1:
            return False
        master = self.node(masters[0])
        if not master.is_master or not self.node(self._other(masters[0])).follows(master):
            return False
        return all(_sees_all(sentinel.state(), master.port) for sentinel in self._sentinels)


class ClusterRedis(Topology):
    """Masters that share the slots, each with its replicas."""

    name = "cluster"

    def __init__(
        self, folder: Path, *, masters: int = 3, replicas: int = 1, node_timeout_ms: int = 1_000, **settings: Any
    ) -> None:
        super().__init__(folder, **settings)
        self._first_masters = masters
        self._replicas = replicas
        self.can_fail_over = replicas > 0
        for number in range(1, masters * (1 + replicas) + 1):
            self._add(
                number,
                cluster_enabled="yes",
                cluster_config_file="nodes.conf",
                cluster_node_timeout=str(node_timeout_ms),
                # An outdated replica may be promoted: it is better than no master.
                cluster_replica_validity_factor="0",
                # Replicas stay with the masters assigned to them.
                cluster_migration_barrier="100",
            )

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes().values())

    def start(self) -> None:
        nodes = list(self.nodes().values())
        known = all((node.folder / "nodes.conf").exists() for node in nodes)
        for node in nodes:
            node.start()
        if not known:
            self._create(nodes)
        self._wait(self._is_complete, "the cluster to be complete")

    def masters(self) -> list[str]:
        """Masters that have slots, according to one running node."""
        ports = self._with_slots()
        return [name for name, node in self.nodes().items() if node.port in ports and node.is_master]

    def owner(self, key: str) -> str:
        """The master that holds this key."""
        slot = call_redis(self._any().port, "CLUSTER", "KEYSLOT", key)
        for first, last, address, *_ in call_redis(self._any().port, "CLUSTER", "SLOTS"):
            if first <= slot <= last:
                return next(name for name, node in self.nodes().items() if node.port == address[1])
        raise LookupError(f"no node has slot {slot}")

    def fail_over(self, *, kill: bool = True, target: str | None = None) -> str:
        old = target or self._wait(self.masters, "a master")[0]
        candidates = self._replicas_of(old)
        if kill:
            self.node(old).kill()
        requested_at = -inf

        def successor() -> str | None:
            nonlocal requested_at
            if not kill and monotonic() - requested_at > _HANDED_OVER_WITHIN_S:
                # Repeated: Redis silently aborts a fail-over that takes longer, as it does on a busy machine.
                requested_at = monotonic()
                with suppress(OSError, hiredis.ReplyError):
                    self.node(candidates[0]).call("CLUSTER", "FAILOVER")
            return self._successor(candidates)

        return str(self._wait(successor, f"a replica of {old} to be promoted"))

    def hang(self, target: str) -> str:
        candidates = self._replicas_of(target)
        self.node(target).pause()
        return str(self._wait(lambda: self._successor(candidates), f"a replica of {target} to be promoted"))

    def heal(self) -> None:
        self._revive()
        self._wait(self._is_complete, "the cluster to be complete again")

    def _create(self, nodes: list[Node]) -> None:
        for epoch, node in enumerate(nodes, 1):
            node.call("CLUSTER", "SET-CONFIG-EPOCH", epoch)
        for node in nodes[1:]:
            node.call("CLUSTER", "MEET", "127.0.0.1", nodes[0].port)
        masters, replicas = nodes[: self._first_masters], nodes[self._first_masters :]
        share = _SLOTS / len(masters)
        for number, master in enumerate(masters):
            master.call("CLUSTER", "ADDSLOTS", *range(round(number * share), round((number + 1) * share)))
        self._wait(lambda: all(_knows(node, len(nodes)) for node in nodes), "all nodes to know each other")
        for number, replica in enumerate(replicas):
            master_id = masters[number % len(masters)].call("CLUSTER", "MYID")
            self._wait(partial(_replicate, replica, master_id), "a replica to know its master")

    def _any(self) -> Node:
        return next(node for node in self.nodes().values() if node.serves)

    def _replicas_of(self, master: str) -> list[str]:
        """Names of its running replicas. Raises `RuntimeError` if there are none."""
        nodes = self.nodes().items()
        if found := [name for name, node in nodes if node.runs and node.is_replica_of(self.node(master))]:
            return found
        raise RuntimeError(f"{master} has no running replica to promote; call heal() first")

    def _successor(self, candidates: list[str]) -> str | None:
        alive = [node for node in self.nodes().values() if node.serves]
        if any(node.info("cluster info").get("cluster_state") != "ok" for node in alive):
            return None
        return next((name for name in candidates if name in self.masters()), None)

    def _with_slots(self) -> set[int]:
        """Ports of the healthy nodes that have slots, according to one running node."""
        found = set()
        for row in str(self._any().call("CLUSTER", "NODES")).splitlines():
            _, address, flags, *rest = row.split()
            healthy = not {"fail", "fail?", "handshake"} & set(flags.split(","))
            if healthy and len(rest) > _BEFORE_SLOTS:
                found.add(int(address.split("@")[0].rpartition(":")[2]))
        return found

    def _is_complete(self) -> bool:
        nodes = list(self.nodes().values())
        for node in nodes:
            info = node.info("cluster info")
            if info.get("cluster_state") != "ok" or info.get("cluster_known_nodes") != str(len(nodes)):
                return False
            if info.get("cluster_slots_ok") != str(_SLOTS):
                return False
        masters = [self.node(name) for name in self.masters()]
        if len(masters) != self._first_masters:
            return False
        return all(node in masters or any(node.follows(master) for master in masters) for node in nodes)


def make_topology(name: str, folder: Path, **settings: Any) -> Topology:
    """Make a topology by name: `single`, `sentinel`, `cluster`."""
    kinds: dict[str, type[Topology]] = {kind.name: kind for kind in (SingleRedis, SentinelRedis, ClusterRedis)}
    if name not in kinds:
        raise ValueError(f"unknown topology {name!r}; use one of {', '.join(kinds)}")
    return kinds[name](folder, **settings)


def _sees_all(state: Mapping[str, str], master_port: int) -> bool:
    """Whether this sentinel sees a healthy master, its replica and both other sentinels."""
    return (
        state.get("port") == str(master_port)
        and state.get("flags") == "master"
        and state.get("num-slaves") == "1"
        and state.get("num-other-sentinels") == "2"
    )


def _knows(node: Node, count: int) -> bool:
    rows = str(node.call("CLUSTER", "NODES")).splitlines()
    return len(rows) == count and not any("handshake" in row for row in rows)


def _replicate(node: Node, master_id: str) -> bool:
    with suppress(hiredis.ReplyError):
        node.call("CLUSTER", "REPLICATE", master_id)
        return True
    return False
