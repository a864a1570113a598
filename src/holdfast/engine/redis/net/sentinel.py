"""Client for Redis behind Sentinel.

Each connection is opened to the current master. All sentinels are queried at once, and the address that most of them
name is tried first: an unreachable sentinel costs nothing, and one that missed a fail-over is outvoted. The server must
confirm that it is a master, or the next address is tried. A server that does not reply is not waited for: the sentinels
are asked again every `_REPEAT_S`.

After a fail-over the old connections break, answer READONLY, or are silent (decision 0041). While one is silent, and
after a refusal like NOREPLICAS, the sentinels are asked again as well. As soon as they name another server, all
connections to the old one are closed. Commands in flight fail as they do when a single Redis restarts.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from random import Random
from typing import Final

import hiredis

from holdfast.engine.redis.net.client import RedisClient
from holdfast.engine.redis.net.connection import PipelinedConnection, RedisAddress, SentinelAddresses
from holdfast.engine.redis.net.errors import translate
from holdfast.errors import EngineUnavailable

_log: Final = logging.getLogger("holdfast.engine.redis")

_Address = tuple[str, int]

#: Timeout for one sentinel; without an answer it has no vote.
_SENTINEL_ANSWER_S: Final = 1.0
#: Interval of queries while the master does not reply or is not found.
_REPEAT_S: Final = 0.5
#: Longest blocking call.
_MAX_BLOCK_MS: Final = 2_000


class SentinelClient(RedisClient):
    """Connections to the current master of one service."""

    max_block_ms = _MAX_BLOCK_MS

    def __init__(self, sentinels: SentinelAddresses, connect_timeout_s: float, reply_timeout_s: float) -> None:
        super().__init__(sentinels.master, connect_timeout_s, reply_timeout_s)
        self._sentinels = sentinels
        self._inquiry: asyncio.Task[None] | None = None
        self._repeat_at = 0.0
        self._random = Random()
        self.report_silence = self._on_silence

    def on_doubt(self) -> None:
        """Ask the sentinels whether another server is the master now."""
        if asyncio.get_running_loop().time() >= self._repeat_at:
            self._start_inquiry(0.0)

    def _on_silence(self) -> None:
        # Later, and at random: a short stall of the server is silence for all its clients at once.
        self._start_inquiry(_REPEAT_S * self._random.uniform(0.5, 1.0))

    def _start_inquiry(self, after_s: float) -> None:
        if self._inquiry is None and not self._closed:
            self._inquiry = asyncio.create_task(self._inquire(after_s))
            self._inquiry.add_done_callback(self._on_inquired)

    def close(self) -> None:
        if self._inquiry is not None:
            self._inquiry.cancel()
        super().close()

    async def _inquire(self, after_s: float) -> None:
        """Ask the sentinels at once (0), or while the master is silent until they name another."""
        while True:
            await asyncio.sleep(after_s)
            if after_s and not self.silent:
                return
            try:
                (named, *_) = await self._candidates({})
            except EngineUnavailable as exc:
                _log.debug("cannot ask the sentinels: %s", exc)
            else:
                self._drop_others(named)
            after_s = _REPEAT_S
            self._repeat_at = asyncio.get_running_loop().time() + _REPEAT_S

    def _on_inquired(self, inquiry: asyncio.Task[None]) -> None:
        self._inquiry = None
        if not inquiry.cancelled() and (exc := inquiry.exception()) is not None:
            _log.error("asking the sentinels failed unexpectedly", exc_info=exc)

    def _drop_others(self, master: _Address) -> None:
        """Close the connections to servers that are not the master."""
        others = {each.address for each in self._open_connections if (each.address.host, each.address.port) != master}
        for address in others:
            _log.info("%s:%d is now the master; closing the connections to %s:%d", *master, address.host, address.port)
            self._drop_server(address)

    async def _reach(self, kind: type[PipelinedConnection]) -> PipelinedConnection:
        """Connect to the master. While the server does not reply, the sentinels are asked whether it still is."""
        loop = asyncio.get_running_loop()
        failures: dict[str, str] = {}
        failed: set[_Address] = set()
        attempts: dict[_Address, asyncio.Task[PipelinedConnection]] = {}
        try:
            candidates = await self._candidates(failures)
            give_up_at = loop.time() + self._connect_timeout_s
            while candidates:
                # Others have fewer votes: one is tried only after this attempt has failed.
                named = candidates[0]
                where = f"{named[0]}:{named[1]}"
                if named not in attempts:
                    attempts[named] = loop.create_task(self._connect_master(kind, named))
                await asyncio.wait([attempts[named]], timeout=_REPEAT_S)
                if not attempts[named].done():
                    failures[where] = f"{where} does not reply"
                    candidates = await self._candidates(failures) if loop.time() < give_up_at else []
                    continue
                try:
                    connection = attempts.pop(named).result()
                except EngineUnavailable as exc:
                    failures[where] = str(exc) if where in str(exc) else f"{where}: {exc}"
                    failed.add(named)
                    # After the last, ask again: the connection may have been closed because another is the master now.
                    candidates = [each for each in candidates if each not in failed] or [
                        each for each in await self._candidates(failures) if each not in failed
                    ]
                else:
                    self._drop_others(named)
                    return connection
        finally:
            await _cancel(attempts.values())
        raise EngineUnavailable(
            f"cannot reach a master of {self._sentinels.service!r}; a fail-over may be in progress "
            f"({'; '.join(failures.values())})"
        )

    async def _connect_master(self, kind: type[PipelinedConnection], address: _Address) -> PipelinedConnection:
        """Connect to a server and check that it is a master."""
        host, port = address
        connection = await self._connect(kind, replace(self._sentinels.master, host=host, port=port))
        try:
            role = (await connection.call(b"ROLE"))[0]
            if role != b"master":
                raise EngineUnavailable(f"{host}:{port} is a {role.decode()}, not a master")
        except (OSError, hiredis.ReplyError) as exc:
            connection.close()
            raise translate(exc) from exc
        except BaseException:
            connection.close()
            raise
        return connection

    async def _candidates(self, failures: dict[str, str]) -> list[_Address]:
        """Addresses named by the sentinels, most votes first. Ends early with a majority. Raises if there is none."""
        votes: Counter[_Address] = Counter()
        queries = [asyncio.create_task(self._query_master(address)) for address in self._sentinels.addresses]
        unknown = 0
        try:
            for answer in asyncio.as_completed(queries):
                try:
                    named = await answer
                except EngineUnavailable as exc:
                    failures[str(exc)] = str(exc)
                    continue
                if named is None:
                    unknown += 1
                    continue
                votes[named] += 1
                if votes[named] > len(queries) // 2:
                    break
        finally:
            for task in queries:
                task.cancel()
            await asyncio.gather(*queries, return_exceptions=True)
        if not votes and unknown:
            raise EngineUnavailable(
                f"the sentinels do not know service {self._sentinels.service!r}; set its name after the hosts in "
                "HOLDFAST_URL: redis+sentinel://HOSTS/SERVICE"
            )
        if not votes:
            raise EngineUnavailable(
                f"no sentinel names a master of {self._sentinels.service!r} ({'; '.join(failures.values())})"
            )
        return [address for address, _ in votes.most_common()]

    async def _query_master(self, address: RedisAddress) -> _Address | None:
        """Address of the master according to one sentinel; None if it does not know the service."""
        where = f"sentinel {address.host}:{address.port}"
        connection: PipelinedConnection | None = None
        timeout_s = min(_SENTINEL_ANSWER_S, self._connect_timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                connection = await PipelinedConnection.connect(address, timeout_s, timeout_s)
                named = await connection.call(b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", self._sentinels.service)
        except TimeoutError as exc:
            raise EngineUnavailable(f"{where} does not answer") from exc
        except hiredis.ReplyError as exc:
            if any(word in str(exc) for word in ("NOAUTH", "WRONGPASS", "without any password")):
                raise EngineUnavailable(
                    f"{where} refused the credentials: {exc}; check sentinel_password in HOLDFAST_URL"
                ) from exc
            raise EngineUnavailable(f"{where}: {exc}") from exc
        except OSError as exc:
            raise EngineUnavailable(f"cannot reach {where}: {exc}") from exc
        finally:
            if connection is not None:
                connection.close()
        return (named[0].decode(), int(named[1])) if named else None


async def _cancel(attempts: Iterable[asyncio.Task[PipelinedConnection]]) -> None:
    for attempt in attempts:
        attempt.cancel()
    for result in await asyncio.gather(*attempts, return_exceptions=True):
        if isinstance(result, PipelinedConnection):
            result.close()
