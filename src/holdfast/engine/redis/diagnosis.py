"""Checks of Redis servers and consumers, for `holdfast doctor` and a worker's warnings at start."""

from __future__ import annotations

import time
from typing import Final

import msgspec

from holdfast.core.key_names import owner_of, queues_key
from holdfast.engine.port.reads import Finding
from holdfast.engine.redis import wire
from holdfast.engine.redis.keys import RETRY_CONSUMER
from holdfast.engine.redis.net.client import Purpose, RedisClient
from holdfast.engine.redis.net.errors import ScriptError
from holdfast.engine.redis.store import RedisStore
from holdfast.errors import EngineUnavailable

_OLDEST_TESTED: Final = (6, 0)
_MAX_SKEW_MS: Final = 1_000
_FULL: Final = 0.9
_RENAME: Final = "rename them, or delete them; see 'Names with a colon' in docs/reference/protocol.md"


class Diagnosis:
    """Checks the server; on a Cluster, every master."""

    def __init__(self, store: RedisStore) -> None:
        self._store = store

    async def servers(self) -> list[Finding]:
        """Check every server. A master of a Cluster that does not answer is a finding, not an error."""
        nodes = await self._store.client.masters()
        if not self._store.names.cluster:
            return [finding for node in nodes for finding in await _Server(node).findings()]
        findings: list[Finding] = []
        for node in nodes:
            address = f"{node.address.host}:{node.address.port}"
            try:
                found = await _Server(node).findings()
            except EngineUnavailable as exc:
                found = [Finding("server", False, str(exc), "restore it or its replica; its queues wait until then")]
            findings += [msgspec.structs.replace(each, check=f"{each.check} of {address}") for each in found]
        return findings

    async def former_keys(self, queue: str) -> list[Finding]:
        """Find keys that an earlier version wrote under other names, unless their namespace uses them."""
        names, call = self._store.names, self._store.client.call
        found: list[str] = []
        for key in names.former(queue):
            namespace, owned = owner_of(key)
            if namespace and await call(Purpose.OTHER, b"SISMEMBER", queues_key(namespace), owned):
                continue
            if await call(Purpose.OTHER, b"EXISTS", key):
                found.append(key)
        if not found:
            return []
        message = f"keys of an earlier version are not read: {', '.join(found)}"
        return [Finding(f"names of {queue}", False, message, _RENAME)]

    async def consumers(self, queue: str) -> Finding:
        """Check for dead consumers."""
        dead = 0
        max_idle_ms = 10 * self._store.options.visibility_timeout_ms
        for _, stream in await self._store.streams_in_use(queue, Purpose.OTHER):
            try:
                rows = await self._store.client.call(
                    Purpose.OTHER, b"XINFO", b"CONSUMERS", stream, self._store.names.group
                )
            except ScriptError:
                continue
            consumers = [wire.as_dict(row) for row in rows]
            dead += sum(
                1
                for consumer in consumers
                if int(consumer[b"idle"]) > max_idle_ms and consumer[b"name"] != RETRY_CONSUMER.encode()
            )
        if not dead:
            return Finding(f"consumers of {queue}", True, "no dead consumers")
        return Finding(
            f"consumers of {queue}",
            False,
            f"{dead} consumers were idle for more than {max_idle_ms // 1000} s",
            "run a worker or `holdfast upkeep`, which reclaims their jobs and removes them",
            warning=True,
        )


def unreachable_finding(queue: str, cause: EngineUnavailable) -> Finding:
    """The finding for a queue whose node does not answer while others do."""
    return Finding(f"queue {queue}", False, f"cannot be reached: {cause}", "restore its server; its jobs wait there")


class _Server:
    """Checks of one server."""

    def __init__(self, node: RedisClient) -> None:
        self._node = node

    async def findings(self) -> list[Finding]:
        info = await self._info()
        findings = [_version(info), await self._persistence(info), await self._eviction(), _memory(info), _role(info)]
        if info.get("cluster_enabled") == "1":
            findings.append(await self._slots())
        return [*findings, await self._clock()]

    async def _info(self) -> dict[str, str]:
        return _pairs(await self._node.call(Purpose.OTHER, b"INFO"))

    async def _slots(self) -> Finding:
        info = _pairs(await self._node.call(Purpose.OTHER, b"CLUSTER", b"INFO"))
        state, served = info.get("cluster_state", "unknown"), info.get("cluster_slots_ok", "0")
        advice = "" if state == "ok" else "restore its masters; see CLUSTER NODES"
        return Finding("cluster", state == "ok", f"state {state}, {served} of 16384 slots are served", advice)

    async def _config(self, name: str) -> str | None:
        try:
            reply = await self._node.call(Purpose.OTHER, b"CONFIG", b"GET", name)
        except EngineUnavailable:
            return None  # managed servers hide CONFIG, or forbid it (NOPERM)
        return reply[1].decode() if reply else None

    async def _persistence(self, info: dict[str, str]) -> Finding:
        if info.get("aof_enabled") != "1":
            return Finding(
                "persistence",
                False,
                "append-only file is off: a restart of Redis loses accepted jobs",
                "CONFIG SET appendonly yes, and set it in redis.conf",
            )
        fsync = await self._config("appendfsync")
        if fsync == "no":
            return Finding(
                "persistence",
                False,
                "appendfsync is 'no': a crash can lose about 30 s of jobs",
                "CONFIG SET appendfsync everysec (or always)",
            )
        notes = {"always": "every reply is on disk", "everysec": "a crash can lose the last second or two"}
        note = notes.get(fsync or "", "ask the operator of this Redis what a crash can lose")
        return Finding("persistence", True, f"append-only file, fsync {fsync or 'unknown (CONFIG is hidden)'}: {note}")

    async def _eviction(self) -> Finding:
        policy = await self._config("maxmemory-policy")
        if policy in (None, "noeviction"):
            return Finding("eviction", True, f"maxmemory-policy {policy or 'unknown (CONFIG is hidden)'}")
        return Finding(
            "eviction",
            False,
            f"maxmemory-policy {policy}: Redis may drop jobs when memory is short",
            "CONFIG SET maxmemory-policy noeviction",
        )

    async def _clock(self) -> Finding:
        before = time.time_ns() // 1_000_000
        server = await self._node.time_ms()
        after = time.time_ns() // 1_000_000
        skew = max(before - server, server - after, 0)
        return Finding(
            "clock",
            skew <= _MAX_SKEW_MS,
            f"this machine and Redis differ by {skew} ms",
            "" if skew <= _MAX_SKEW_MS else "jobs are safe, leases use the clock of Redis; fix NTP for correct times",
            warning=True,
        )


def _pairs(text: bytes) -> dict[str, str]:
    pairs = (line.partition(":") for line in text.decode().splitlines() if ":" in line)
    return {name: value for name, _, value in pairs}


def _version(info: dict[str, str]) -> Finding:
    version = info.get("redis_version", "0")
    known = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if known < _OLDEST_TESTED:
        return Finding("version", False, f"Redis {version} is older than any tested version", "use Redis 6.2 or later")
    return Finding("version", True, f"Redis {version}")


def _memory(info: dict[str, str]) -> Finding:
    limit, used = int(info.get("maxmemory", "0")), int(info.get("used_memory", "0"))
    if not limit:
        return Finding("memory", True, f"{used / 2**20:,.0f} MiB used, no limit set")
    share = used / limit
    return Finding(
        "memory",
        share < _FULL,
        f"{used / 2**20:,.0f} of {limit / 2**20:,.0f} MiB used ({share:.0%})",
        "" if share < _FULL else "drain queues or raise maxmemory; new jobs are refused when memory is full",
    )


def _role(info: dict[str, str]) -> Finding:
    role = info.get("role", "unknown")
    advice = "" if role == "master" else "connect to the master: replicas refuse writes"
    return Finding("role", role == "master", f"this server is a {role}", advice)
