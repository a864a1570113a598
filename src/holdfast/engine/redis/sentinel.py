"""Redis behind Sentinel: each connection goes to whoever is the master when it is opened.

The sentinels are asked all at once, and the address that most of them name is tried first, so that one which is dead
costs nothing and one which has missed a fail-over is outvoted. The server must say itself that it is a master, or the
next address is tried. After a fail-over the old connections break, or answer READONLY and are closed; what was on its
way fails as it does when a single Redis restarts.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Final

import hiredis

from holdfast.engine.redis.client import Client, translate
from holdfast.engine.redis.connection import Address, Connection
from holdfast.engine.redis.url import Sentinels
from holdfast.errors import EngineUnavailable

#: A sentinel that has not answered by then has no say.
_ANSWER_S: Final = 1.0


class SentinelClient(Client):
    """A small set of connections to the master of one service."""

    def __init__(self, sentinels: Sentinels, connect_timeout_s: float, reply_timeout_s: float) -> None:
        super().__init__(sentinels.master, connect_timeout_s, reply_timeout_s)
        self._sentinels = sentinels

    async def _reach(self, kind: type[Connection]) -> Connection:
        failures: list[str] = []
        for host, port in await self._candidates(failures):
            address = replace(self._sentinels.master, host=host, port=port)
            try:
                connection = await self._connect(kind, address)
            except EngineUnavailable as exc:
                failures.append(f"{host}:{port}: {exc}")
                continue
            try:
                role = (await connection.call(b"ROLE"))[0]
            except (OSError, hiredis.ReplyError) as exc:
                connection.close()
                failures.append(f"{host}:{port}: {translate(exc)}")
                continue
            except BaseException:
                connection.close()
                raise
            if role == b"master":
                return connection
            connection.close()
            failures.append(f"{host}:{port} is a {role.decode()}, no master")
        raise EngineUnavailable(
            f"no master of {self._sentinels.service!r} can be reached; a fail-over may be under way "
            f"({'; '.join(failures)})"
        )

    async def _candidates(self, failures: list[str]) -> list[tuple[str, int]]:
        """Addresses that the sentinels name, the one with most votes first; a majority ends the vote."""
        votes: Counter[tuple[str, int]] = Counter()
        asking = [asyncio.create_task(self._ask(address)) for address in self._sentinels.addresses]
        unknown = 0
        try:
            for answer in asyncio.as_completed(asking):
                try:
                    named = await answer
                except EngineUnavailable as exc:
                    failures.append(str(exc))
                    continue
                if named is None:
                    unknown += 1
                    continue
                votes[named] += 1
                if votes[named] > len(asking) // 2:
                    break
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
        if not votes and unknown:
            raise EngineUnavailable(
                f"the sentinels watch no service named {self._sentinels.service!r}; its name is what comes after the "
                "hosts in HOLDFAST_URL: redis+sentinel://HOSTS/SERVICE"
            )
        return [address for address, _ in votes.most_common()]

    async def _ask(self, address: Address) -> tuple[str, int] | None:
        """Who is master, says one sentinel; None if it does not watch the service."""
        where = f"sentinel {address.host}:{address.port}"
        connection: Connection | None = None
        patience_s = min(_ANSWER_S, self._connect_timeout_s)
        try:
            async with asyncio.timeout(patience_s):
                connection = await Connection.connect(address, patience_s, patience_s)
                named = await connection.call(b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", self._sentinels.service)
        except TimeoutError as exc:
            raise EngineUnavailable(f"{where} does not answer") from exc
        except hiredis.ReplyError as exc:
            if any(word in str(exc) for word in ("NOAUTH", "WRONGPASS", "without any password")):
                raise EngineUnavailable(f"{where} refuses us: {exc}; see sentinel_password in HOLDFAST_URL") from exc
            raise EngineUnavailable(f"{where}: {exc}") from exc
        except OSError as exc:
            raise EngineUnavailable(f"{where} cannot be reached: {exc}") from exc
        finally:
            if connection is not None:
                connection.close()
        return (named[0].decode(), int(named[1])) if named else None
