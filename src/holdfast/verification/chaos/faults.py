"""Plan the faults of a chaos run from its seed, and inject them.

`plan` is deterministic: the same arguments give the same faults on every machine.

When `inject` returns, the fault has ended and its damage is repaired. If it is cancelled, disks are freed, connections
reopened and processes resumed; only `Deployment.heal` guarantees that all processes run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, suppress
from random import Random
from time import monotonic
from typing import Final

import hiredis

from holdfast.verification.chaos.deployment import STRICT, Deployment
from holdfast.verification.chaos.parts import DiskPostgres, Fault, FaultKind, Part, do, group_of
from holdfast.verification.chaos.proxy import Proxy
from holdfast.verification.chaos.redis_nodes import ask

#: The first and the last fault strike when this share of all jobs is accepted.
_FIRST: Final = 0.03
_LAST: Final = 0.97
#: So many faults strike together with the one before.
_OVERLAPPING: Final = 0.25

#: Where masters can be taken away: one fault of so many, by kill and by hand-over in turn.
_FAIL_OVER_ONE_OF: Final = 8
#: What matters more, or is worse, happens more often once everything has happened; the rest counts 1.
_WEIGHTS: Final[Mapping[tuple[FaultKind, str], int]] = {
    (FaultKind.KILL, "worker"): 5,
    (FaultKind.STOP, "worker"): 5,
    (FaultKind.KILL, "redis"): 4,
    (FaultKind.KILL, "postgres"): 4,
    (FaultKind.LOSE_REPLY, "redis"): 4,
    (FaultKind.LOSE_REPLY, "postgres"): 4,
    (FaultKind.LOSE_REPLY, "server"): 3,
    (FaultKind.STOP, "redis"): 2,
    (FaultKind.STOP, "postgres"): 2,
}

#: Seconds, from and to, by kind; with leases of 3 s and reply timeouts of 2 s some outlast them and some do not.
_LASTING: Final[Mapping[FaultKind, tuple[float, float]]] = {
    FaultKind.STOP: (0.2, 6.0),
    FaultKind.SLOW: (1.0, 4.0),
    FaultKind.STALL: (0.3, 5.0),
    FaultKind.LOSE_REPLY: (0.5, 3.0),
    FaultKind.FILL: (1.0, 4.0),
}


def plan(seed: int, faults: int, parts: Mapping[str, frozenset[FaultKind]]) -> list[Fault]:
    """So many faults in the order in which they strike; those with the same `at` strike together.

    Every kind strikes every group of parts (`worker`, `redis` …) that it can strike, before chance and weights decide,
    if there are enough faults for that; where masters can be taken away, that happens all the time. The same on every
    machine, for the same arguments.
    """
    random = Random(f"holdfast chaos {seed}")
    pairs = _pairs(parts)
    if not pairs:
        return []
    chosen = random.sample(pairs, len(pairs))
    if faults > len(chosen):
        chosen += random.choices(pairs, [_WEIGHTS.get(pair, 1) for pair in pairs], k=faults - len(chosen))
    chosen = _with_fail_overs(
        random, chosen, [pair for pair in pairs if pair[0] in (FaultKind.FAIL_OVER, FaultKind.HAND_OVER)]
    )
    found: list[Fault] = []
    for number, ((kind, group), at) in enumerate(zip(chosen[:faults], _positions(random, faults), strict=True), 1):
        target = random.choice([name for name in sorted(parts) if group_of(name) == group and kind in parts[name]])
        found.append(Fault(number=number, at=at, kind=kind, target=target, seconds=_seconds(random, kind)))
    return found


def pairs_of(parts: Mapping[str, frozenset[FaultKind]]) -> set[tuple[FaultKind, str]]:
    """All that can happen: kinds of faults and the groups of parts that they can strike."""
    return set(_pairs(parts))


def _pairs(parts: Mapping[str, frozenset[FaultKind]]) -> list[tuple[FaultKind, str]]:
    return sorted({(kind, group_of(name)) for name, kinds in parts.items() for kind in kinds})


def _with_fail_overs(
    random: Random, chosen: list[tuple[FaultKind, str]], ways: list[tuple[FaultKind, str]]
) -> list[tuple[FaultKind, str]]:
    """One more in every stretch of the plan, by each way in turn."""
    if not ways:
        return chosen
    others = _FAIL_OVER_ONE_OF - 1
    found: list[tuple[FaultKind, str]] = []
    for number, begin in enumerate(range(0, len(chosen), others)):
        stretch = chosen[begin : begin + others]
        stretch.insert(random.randint(0, len(stretch)), ways[number % len(ways)])
        found += stretch
    return found


def _positions(random: Random, faults: int) -> list[float]:
    """Spread evenly, a little off, and some of them at the same moment as the one before."""
    together = [number > 0 and random.random() < _OVERLAPPING for number in range(faults)]
    moments = together.count(False)
    step = (_LAST - _FIRST) / max(1, moments)
    found: list[float] = []
    moment = 0
    for joins in together:
        if joins:
            found.append(found[-1])
            continue
        found.append(round(_FIRST + step * (moment + random.uniform(0, 0.8)), 6))
        moment += 1
    return found


def _seconds(random: Random, kind: FaultKind) -> float:
    lasting = _LASTING.get(kind)
    return 0.0 if lasting is None else round(random.uniform(*lasting), 3)


#: How long a server may take to be itself again after its disk was full.
_PATIENCE_S: Final = 60.0
#: How long to wait for a request whose reply can be lost.
_TRAFFIC_S: Final = 10.0
_LOOK_S: Final = 0.05
_SLOWEST_S: Final = (0.05, 0.5)

#: By group of parts: the requests whose replies are lost, on every way. They change something, or might.
_DOOMED: Final[Mapping[str, tuple[bytes, ...]]] = {
    "redis": (b"EVALSHA", b"EVALSHA", b"EVALSHA"),
    "postgres": (b"COMMIT", b"INSERT", b"COMMIT"),
    "server": (b"POST ", b"POST ", b"POST "),
}


async def inject(deployment: Deployment, fault: Fault) -> str:
    """Do it and wait until it is over. Returns why it could not be done, or nothing.

    Faults may overlap; two on the same part wait for each other.
    """
    part = deployment.parts[fault.target]
    if fault.kind not in part.kinds:
        return deployment.cannot.get(f"{fault.kind} {part.name}", f"{fault.kind} cannot be done to {part.name} here")
    async with AsyncExitStack() as stack:
        # Servers that stand in for each other are hurt one at a time: there is nobody left to take over else.
        for each in sorted(_company(deployment, part), key=lambda each: each.name):
            await stack.enter_async_context(each.in_trouble)
            await deployment.check_part(each)
        try:
            said = await _DEEDS[fault.kind](deployment, part, fault)
            if deployment.topology is not None and part.name in deployment.topology.servers:
                await do(deployment.topology.heal)
        finally:
            part.hurt_until = monotonic()
        return said


def _company(deployment: Deployment, part: Part) -> list[Part]:
    servers = {} if deployment.topology is None else deployment.topology.servers
    return [deployment.parts[name] for name in servers] if part.name in servers else [part]


async def _kill(deployment: Deployment, part: Part, fault: Fault) -> str:
    await do(lambda: _if_running(part, part.process.kill))
    await deployment.restart_part(part)
    return ""


async def _stop(deployment: Deployment, part: Part, fault: Fault) -> str:
    await do(lambda: _if_running(part, part.process.pause))
    try:
        await asyncio.sleep(fault.seconds)
    finally:
        await do(part.process.resume)
    return ""


async def _restart(deployment: Deployment, part: Part, fault: Fault) -> str:
    await do(part.process.stop)
    await deployment.restart_part(part)
    return ""


async def _cut(deployment: Deployment, part: Part, fault: Fault) -> str:
    cut = sum(door.connections for door in part.doors)
    for door in part.doors:
        await door.cut()
    return "" if cut else "nobody was connected to it"


async def _slow(deployment: Deployment, part: Part, fault: Fault) -> str:
    random = Random(f"{deployment.seed} {fault.number}")
    try:
        for door in part.doors:
            door.delay_s = random.uniform(*_SLOWEST_S)
        await asyncio.sleep(fault.seconds)
    finally:
        for door in part.doors:
            door.delay_s = 0.0
    return ""


async def _stall(deployment: Deployment, part: Part, fault: Fault) -> str:
    try:
        for door in part.doors:
            door.stall()
        await asyncio.sleep(fault.seconds)
    finally:
        for door in part.doors:
            door.flow()
    return ""


async def _lose_reply(deployment: Deployment, part: Part, fault: Fault) -> str:
    # A web server's own door is the last one; the others are its ways to the stores.
    doors = part.doors[-1:] if part.group == "server" else part.doors
    before = _lost(doors)
    for door in doors:
        for word in _DOOMED[part.group]:
            door.lose_reply(word)
    try:
        await asyncio.sleep(fault.seconds)
        await _until(lambda: _lost(doors) > before, _TRAFFIC_S)
    finally:
        for door in doors:
            door.spare()
    return "" if _lost(doors) > before else "nobody asked it for anything meanwhile"


async def _fill(deployment: Deployment, part: Part, fault: Fault) -> str:
    """Full for a while, and until it was felt. A server that went down by it is started when there is room again."""
    disk = part.disk
    assert disk is not None
    # Redis goes down rather than break the promise to have written before it answers; without it, it refuses writes.
    refuses = part.group == "redis" and fault.number % 2 == 0
    if refuses:
        await do(lambda: _set(part, "everysec"))
    before = await do(lambda: _complaints(part))
    try:
        await do(disk.fill)
        await asyncio.sleep(fault.seconds)
        felt = await _until(lambda: do(lambda: _has_felt_it(part, before)), _TRAFFIC_S)
    finally:
        await do(disk.free)
    await _until(lambda: do(lambda: _is_itself(part)), _PATIENCE_S)
    if refuses:
        # As an operator must: Redis 7.0 can have left a hole in its file, and would not start from that again.
        await _write_anew(part)
        await do(lambda: _set(part, STRICT["appendfsync"]))
    return "" if felt else "it was not asked to write anything meanwhile"


async def _fail_over(deployment: Deployment, part: Part, fault: Fault) -> str:
    topology = deployment.topology
    assert topology is not None
    # On a Cluster a queue lies with one of the masters: all of them have their turn.
    masters = sorted(await do(topology.masters))
    target = Random(f"{deployment.seed} {fault.number}").choice(masters) if masters else None
    await do(lambda: topology.fail_over(kill=fault.kind is FaultKind.FAIL_OVER, target=target))
    return ""


_DEEDS: Final[Mapping[FaultKind, Callable[[Deployment, Part, Fault], Awaitable[str]]]] = {
    FaultKind.KILL: _kill,
    FaultKind.STOP: _stop,
    FaultKind.RESTART: _restart,
    FaultKind.CUT: _cut,
    FaultKind.SLOW: _slow,
    FaultKind.STALL: _stall,
    FaultKind.LOSE_REPLY: _lose_reply,
    FaultKind.FILL: _fill,
    FaultKind.FAIL_OVER: _fail_over,
    FaultKind.HAND_OVER: _fail_over,
}


def _if_running(part: Part, verb: Callable[[], None]) -> None:
    """One that has just died by itself can be neither killed nor stopped: it is on its way back all the same."""
    if part.process.started and part.process.ended is None:
        verb()


def _lost(doors: list[Proxy]) -> int:
    return sum(door.lost for door in doors)


def _set(part: Part, appendfsync: str) -> None:
    ask(part.process.port, "CONFIG", "SET", "appendfsync", appendfsync)


async def _write_anew(part: Part) -> None:
    """Its file, from memory. One that is being written already may have begun too early."""
    await _until(lambda: do(lambda: _is_told(part, "BGREWRITEAOF")), _PATIENCE_S)
    await _until(lambda: do(lambda: "aof_rewrite_in_progress:0" in _persistence(part)), _PATIENCE_S)


def _is_told(part: Part, command: str) -> bool:
    with suppress(OSError, hiredis.ReplyError):
        ask(part.process.port, command)
        return True
    return False


def _persistence(part: Part) -> str:
    """What Redis says of its file; empty if it says nothing."""
    with suppress(OSError, hiredis.ReplyError):
        return str(ask(part.process.port, "INFO", "persistence"))
    return ""


def _complaints(part: Part) -> int:
    return part.process.complaints() if isinstance(part.process, DiskPostgres) else 0


def _has_felt_it(part: Part, complaints: int) -> bool:
    """It could not write: it says so, or went down. There were so many complaints before."""
    if part.process.ended is not None or _complaints(part) > complaints:
        return True
    return part.group == "redis" and "aof_last_write_status:err" in _persistence(part)


def _is_itself(part: Part) -> bool:
    """It runs, answers, and writes to its disk; started again if it does not run."""
    if part.process.ended is not None or not part.process.started:
        with suppress(RuntimeError, TimeoutError):
            part.revive()
        return False
    if part.group != "redis":
        return part.process.answers()
    return "aof_last_write_status:ok" in _persistence(part)


async def _until(look: Callable[[], bool | Awaitable[bool]], within_s: float) -> bool:
    give_up_at = monotonic() + within_s
    while True:
        seen = look()
        if seen if isinstance(seen, bool) else await seen:
            return True
        if monotonic() > give_up_at:
            return False
        await asyncio.sleep(_LOOK_S)
