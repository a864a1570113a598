"""Plan the faults of a chaos run from its seed, and inject them.

`plan` is deterministic: the same arguments give the same faults on every machine.

When `inject` returns, the fault has ended and its damage is repaired. If it is cancelled, disks are freed, connections
reopened and processes resumed; only `Deployment.heal` guarantees that all processes run.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from random import Random
from time import monotonic
from typing import Final

import hiredis
import msgspec

from holdfast.verification.chaos.deployment import STRICT, Deployment
from holdfast.verification.chaos.parts import DiskPostgres, Fault, FaultKind, Part, do, group_of
from holdfast.verification.chaos.proxy import Proxy
from holdfast.verification.chaos.redis_nodes import call_redis
from holdfast.verification.chaos.workload import crashes

#: The first and the last fault start when this share of all jobs is accepted.
_FIRST: Final = 0.03
_LAST: Final = 0.97
#: Share of faults that start together with the one before.
_OVERLAPPING: Final = 0.25

#: Where masters can fail over, one fault in N is a fail-over. Kills, planned fail-overs and hung masters alternate.
_FAIL_OVER_ONE_OF: Final = 8
_FAIL_OVERS: Final = (FaultKind.FAIL_OVER, FaultKind.HAND_OVER, FaultKind.HANG)
#: Weights once every fault has happened: higher for more important or worse faults. Default: 1.
_WEIGHTS: Final[Mapping[tuple[FaultKind, str], int]] = {
    (FaultKind.KILL, "worker"): 5,
    (FaultKind.STOP, "worker"): 5,
    (FaultKind.KILL, "redis"): 4,
    (FaultKind.KILL, "postgres"): 4,
    (FaultKind.LOSE_REPLY, "redis"): 4,
    (FaultKind.LOSE_REPLY, "postgres"): 4,
    (FaultKind.LOSE_REPLY, "server"): 3,
    (FaultKind.CRASH, "worker"): 3,
    (FaultKind.OUTAGES, "redis"): 3,
    (FaultKind.REWIND, "redis"): 4,
    (FaultKind.STOP, "redis"): 2,
    (FaultKind.STOP, "postgres"): 2,
}

#: Range of durations in seconds. Some outlast leases (3 s) and reply timeouts (2 s), some do not.
_LASTING: Final[Mapping[FaultKind, tuple[float, float]]] = {
    FaultKind.STOP: (0.2, 6.0),
    FaultKind.SLOW: (1.0, 4.0),
    FaultKind.STALL: (0.3, 5.0),
    FaultKind.LOSE_REPLY: (0.5, 3.0),
    FaultKind.FILL: (1.0, 4.0),
    FaultKind.HANG: (0.0, 2.0),
    FaultKind.OUTAGES: (6.0, 9.0),
    FaultKind.REWIND: (0.3, 4.0),
}
#: Shares of the single outages; the first outlasts a lease. Between two of them, Redis works for a moment.
_OUTAGES: Final = (0.6, 0.2, 0.2)
_BETWEEN_OUTAGES_S: Final = 0.5


def plan(seed: int, faults: int, parts: Mapping[str, frozenset[FaultKind]]) -> list[Fault]:
    """Plan `faults` faults in the order in which they start; those with the same `at` start together.

    First every kind is injected into every possible group of parts (`worker`, `redis` …), if there are enough faults
    for that; then weighted chance decides. Fail-overs, where possible, are spread over the whole plan. The same
    arguments give the same plan on every machine.
    """
    random = Random(f"holdfast chaos {seed}")
    pairs = _pairs(parts)
    if not pairs:
        return []
    chosen = random.sample(pairs, len(pairs))
    if faults > len(chosen):
        chosen += random.choices(pairs, [_WEIGHTS.get(pair, 1) for pair in pairs], k=faults - len(chosen))
    chosen = _with_fail_overs(random, chosen, [pair for pair in pairs if pair[0] in _FAIL_OVERS])
    found: list[Fault] = []
    for number, ((kind, group), at) in enumerate(zip(chosen[:faults], _positions(random, faults), strict=True), 1):
        target = random.choice([name for name in sorted(parts) if group_of(name) == group and kind in parts[name]])
        found.append(Fault(number=number, at=at, kind=kind, target=target, seconds=_seconds(random, kind)))
    return found


def pairs_of(parts: Mapping[str, frozenset[FaultKind]]) -> set[tuple[FaultKind, str]]:
    """All possible faults, as pairs of kind and group of parts."""
    return set(_pairs(parts))


def _pairs(parts: Mapping[str, frozenset[FaultKind]]) -> list[tuple[FaultKind, str]]:
    return sorted({(kind, group_of(name)) for name, kinds in parts.items() for kind in kinds})


def _with_fail_overs(
    random: Random, chosen: list[tuple[FaultKind, str]], ways: list[tuple[FaultKind, str]]
) -> list[tuple[FaultKind, str]]:
    """Add a fail-over to every `_FAIL_OVER_ONE_OF - 1` other faults, alternating between `ways`."""
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
    """Start of each fault: evenly spread with some jitter. Some faults start with the one before."""
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


#: How long a server may take to recover after its disk was full.
_TIMEOUT_S: Final = 60.0
#: How long to wait for a request whose reply can be dropped.
_TRAFFIC_S: Final = 10.0
_POLL_S: Final = 0.05
_SLOWEST_S: Final = (0.05, 0.5)

#: Requests whose replies are dropped on each proxy, by group of parts. They write, or may write.
_DOOMED: Final[Mapping[str, tuple[bytes, ...]]] = {
    "redis": (b"EVALSHA", b"EVALSHA", b"EVALSHA"),
    "postgres": (b"COMMIT", b"INSERT", b"COMMIT"),
    "server": (b"POST ", b"POST ", b"POST "),
}


async def inject(deployment: Deployment, fault: Fault) -> str:
    """Inject a fault and wait until it has ended. Returns why it was not possible, or an empty string.

    Faults may overlap; those on the same part are injected one after the other.
    """
    part = deployment.parts[fault.target]
    if fault.kind not in part.kinds:
        return deployment.unsupported.get(
            f"{fault.kind} {part.name}", f"{fault.kind} cannot be done to {part.name} here"
        )
    async with AsyncExitStack() as stack:
        # Redundant servers fail one at a time: otherwise no replica may be left to promote.
        for each in sorted(_redundant_parts(deployment, part), key=lambda each: each.name):
            await stack.enter_async_context(each.fault_lock)
            await deployment.check_part(each)
        try:
            skipped = await _INJECTORS[fault.kind](deployment, part, fault)
            if deployment.topology is not None and part.name in deployment.topology.servers:
                await do(deployment.topology.heal)
        finally:
            part.hurt_until = monotonic()
        return skipped


def _redundant_parts(deployment: Deployment, part: Part) -> list[Part]:
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
    cut = sum(proxy.connections for proxy in part.proxies)
    for proxy in part.proxies:
        await proxy.cut()
    return "" if cut else "it had no connections"


async def _slow(deployment: Deployment, part: Part, fault: Fault) -> str:
    random = Random(f"{deployment.seed} {fault.number}")
    try:
        for proxy in part.proxies:
            proxy.delay_s = random.uniform(*_SLOWEST_S)
        await asyncio.sleep(fault.seconds)
    finally:
        for proxy in part.proxies:
            proxy.delay_s = 0.0
    return ""


async def _stall(deployment: Deployment, part: Part, fault: Fault) -> str:
    try:
        for proxy in part.proxies:
            proxy.stall()
        await asyncio.sleep(fault.seconds)
    finally:
        for proxy in part.proxies:
            proxy.flow()
    return ""


async def _lose_reply(deployment: Deployment, part: Part, fault: Fault) -> str:
    # The last proxy of a web server is the one its clients use; the others lead to the stores.
    proxies = part.proxies[-1:] if part.group == "server" else part.proxies
    before = _count_lost(proxies)
    for proxy in proxies:
        for word in _DOOMED[part.group]:
            proxy.lose_reply(word)
    try:
        await asyncio.sleep(fault.seconds)
        await _wait_until(lambda: _count_lost(proxies) > before, _TRAFFIC_S)
    finally:
        for proxy in proxies:
            proxy.spare()
    return "" if _count_lost(proxies) > before else "no request was sent to it meanwhile"


async def _fill(deployment: Deployment, part: Part, fault: Fault) -> str:
    """Keep the disk full until a write has failed.

    A server that went down is started when there is space again.
    """
    disk = part.disk
    assert disk is not None
    # With appendfsync always Redis exits when it cannot write; with everysec it refuses writes.
    refuses = part.group == "redis" and fault.number % 2 == 0
    if refuses:
        await do(lambda: _set(part, "everysec"))
    before = await do(lambda: _write_errors(part))
    try:
        await do(disk.fill)
        await asyncio.sleep(fault.seconds)
        affected = await _wait_until(lambda: do(lambda: _is_affected(part, before)), _TRAFFIC_S)
    finally:
        await do(disk.free)
    await _wait_until(lambda: do(lambda: _has_recovered(part)), _TIMEOUT_S)
    if refuses:
        # Operators must do the same: Redis 7.0 can leave a hole in its file and then does not start from it.
        await _rewrite_aof(part)
        await do(lambda: _set(part, STRICT["appendfsync"]))
    return "" if affected else "nothing was written to it meanwhile"


async def _fail_over(deployment: Deployment, part: Part, fault: Fault) -> str:
    topology = deployment.topology
    assert topology is not None
    # On a Cluster each queue is on one of the masters: choose among all of them.
    masters = sorted(await do(topology.masters))
    target = Random(f"{deployment.seed} {fault.number}").choice(masters) if masters else None
    if target is not None and fault.kind is FaultKind.HANG:
        try:
            await do(lambda: topology.hang(target))
            await asyncio.sleep(fault.seconds)
        finally:
            await do(topology.node(target).resume)
        return ""
    await do(lambda: topology.fail_over(kill=fault.kind is not FaultKind.HAND_OVER, target=target))
    return ""


async def _interrupt(deployment: Deployment, part: Part, fault: Fault) -> str:
    """Several outages, by SIGKILL and SIGSTOP in turn, so that reclaims wait several times."""
    for number, share in enumerate(_OUTAGES, fault.number):
        outage = msgspec.structs.replace(fault, seconds=fault.seconds * share)
        if number % 2:
            await _stop(deployment, part, outage)
        else:
            await do(lambda: _if_running(part, part.process.kill))
            await asyncio.sleep(outage.seconds)
            await deployment.restart_part(part)
        await asyncio.sleep(_BETWEEN_OUTAGES_S)
    return ""


async def _rewind(deployment: Deployment, part: Part, fault: Fault) -> str:
    """Start Redis with the data that it had some seconds before."""
    disk, copy = part.disk, deployment.folder / f"data-before-fault-{fault.number}"
    assert disk is not None
    await do(lambda: _copy_data(part, disk.folder, copy))
    try:
        await asyncio.sleep(fault.seconds)
        await do(lambda: _if_running(part, part.process.kill))
        await do(lambda: _put_back(copy, disk.folder))
    finally:
        await do(lambda: shutil.rmtree(copy, ignore_errors=True))
    await deployment.restart_part(part)
    return ""


def _copy_data(part: Part, data: Path, copy: Path) -> None:
    # Paused, so that all files are of the same moment.
    _if_running(part, part.process.pause)
    try:
        shutil.copytree(data, copy, ignore=shutil.ignore_patterns("temp-*", "*.log"))
    finally:
        part.process.resume()


def _put_back(copy: Path, data: Path) -> None:
    for path in data.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.suffix != ".log":
            path.unlink()
    shutil.copytree(copy, data, dirs_exist_ok=True)


async def _crash(deployment: Deployment, part: Part, fault: Fault) -> str:
    """Submit a job that ends its worker, and wait until it has. Any worker may claim it."""
    if deployment.submit_crash is None or not (job_id := await deployment.submit_crash(fault.number)):
        return "its job was not accepted"

    async def has_crashed() -> bool:
        await deployment.check_part(part)
        return any(crash.job_id == job_id for crash in await do(lambda: crashes(deployment.folder)))

    return "" if await _wait_until(has_crashed, _TRAFFIC_S) else "its job has not run in time"


_INJECTORS: Final[Mapping[FaultKind, Callable[[Deployment, Part, Fault], Awaitable[str]]]] = {
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
    FaultKind.HANG: _fail_over,
    FaultKind.OUTAGES: _interrupt,
    FaultKind.REWIND: _rewind,
    FaultKind.CRASH: _crash,
}


def _if_running(part: Part, verb: Callable[[], None]) -> None:
    """Call `verb` unless the process has just ended by itself; the deployment restarts it then."""
    if part.process.started and part.process.ended is None:
        verb()


def _count_lost(proxies: list[Proxy]) -> int:
    return sum(proxy.lost for proxy in proxies)


def _set(part: Part, appendfsync: str) -> None:
    call_redis(part.process.port, "CONFIG", "SET", "appendfsync", appendfsync)


async def _rewrite_aof(part: Part) -> None:
    """Rewrite the append-only file from memory.

    Waits for a rewrite that is already in progress, which may have begun too early, and starts another.
    """
    await _wait_until(lambda: do(lambda: _accepts(part, "BGREWRITEAOF")), _TIMEOUT_S)
    await _wait_until(lambda: do(lambda: "aof_rewrite_in_progress:0" in _persistence(part)), _TIMEOUT_S)


def _accepts(part: Part, command: str) -> bool:
    with suppress(OSError, hiredis.ReplyError):
        call_redis(part.process.port, command)
        return True
    return False


def _persistence(part: Part) -> str:
    """INFO persistence of Redis; empty if it does not answer."""
    with suppress(OSError, hiredis.ReplyError):
        return str(call_redis(part.process.port, "INFO", "persistence"))
    return ""


def _write_errors(part: Part) -> int:
    return part.process.write_errors() if isinstance(part.process, DiskPostgres) else 0


def _is_affected(part: Part, errors_before: int) -> bool:
    """Whether a write failed: it reports an error, or went down.

    `errors_before` is the number of its write errors before the fault.
    """
    if part.process.ended is not None or _write_errors(part) > errors_before:
        return True
    return part.group == "redis" and "aof_last_write_status:err" in _persistence(part)


def _has_recovered(part: Part) -> bool:
    """Whether it runs, answers and writes to its disk. Starts it if it does not run."""
    if part.process.ended is not None or not part.process.started:
        with suppress(RuntimeError, TimeoutError):
            part.revive()
        return False
    if part.group != "redis":
        return part.process.answers()
    return "aof_last_write_status:ok" in _persistence(part)


async def _wait_until(condition: Callable[[], bool | Awaitable[bool]], within_s: float) -> bool:
    deadline = monotonic() + within_s
    while True:
        value = condition()
        if value if isinstance(value, bool) else await value:
            return True
        if monotonic() > deadline:
            return False
        await asyncio.sleep(_POLL_S)
