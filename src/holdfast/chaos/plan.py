"""What is going to happen in a chaos run, and when: all of it follows from the seed."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Final

from holdfast.chaos.model import Fault, Kind
from holdfast.chaos.parts import group_of

#: The first and the last fault strike when this share of all jobs is accepted.
_FIRST: Final = 0.03
_LAST: Final = 0.97
#: So many faults strike together with the one before.
_OVERLAPPING: Final = 0.25

#: Where masters can be taken away: one fault of so many, by kill and by hand-over in turn.
_FAIL_OVER_ONE_OF: Final = 8
#: What matters more, or is worse, happens more often once everything has happened; the rest counts 1.
_WEIGHTS: Final[Mapping[tuple[Kind, str], int]] = {
    (Kind.KILL, "worker"): 5,
    (Kind.STOP, "worker"): 5,
    (Kind.KILL, "redis"): 4,
    (Kind.KILL, "postgres"): 4,
    (Kind.LOSE_REPLY, "redis"): 4,
    (Kind.LOSE_REPLY, "postgres"): 4,
    (Kind.LOSE_REPLY, "server"): 3,
    (Kind.STOP, "redis"): 2,
    (Kind.STOP, "postgres"): 2,
}

#: Seconds, from and to, by kind; with leases of 3 s and reply timeouts of 2 s some outlast them and some do not.
_LASTING: Final[Mapping[Kind, tuple[float, float]]] = {
    Kind.STOP: (0.2, 6.0),
    Kind.SLOW: (1.0, 4.0),
    Kind.STALL: (0.3, 5.0),
    Kind.LOSE_REPLY: (0.5, 3.0),
    Kind.FILL: (1.0, 4.0),
}


def plan(seed: int, faults: int, parts: Mapping[str, frozenset[Kind]]) -> list[Fault]:
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
    chosen = _with_fail_overs(random, chosen, [pair for pair in pairs if pair[0] in (Kind.FAIL_OVER, Kind.HAND_OVER)])
    found: list[Fault] = []
    for number, ((kind, group), at) in enumerate(zip(chosen[:faults], _positions(random, faults), strict=True), 1):
        target = random.choice([name for name in sorted(parts) if group_of(name) == group and kind in parts[name]])
        found.append(Fault(number=number, at=at, kind=kind, target=target, seconds=_seconds(random, kind)))
    return found


def pairs_of(parts: Mapping[str, frozenset[Kind]]) -> set[tuple[Kind, str]]:
    """All that can happen: kinds of faults and the groups of parts that they can strike."""
    return set(_pairs(parts))


def _pairs(parts: Mapping[str, frozenset[Kind]]) -> list[tuple[Kind, str]]:
    return sorted({(kind, group_of(name)) for name, kinds in parts.items() for kind in kinds})


def _with_fail_overs(
    random: Random, chosen: list[tuple[Kind, str]], ways: list[tuple[Kind, str]]
) -> list[tuple[Kind, str]]:
    """One more in every stretch of the plan, by each way in turn."""
    if not ways:
        return chosen
    others = _FAIL_OVER_ONE_OF - 1
    found: list[tuple[Kind, str]] = []
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


def _seconds(random: Random, kind: Kind) -> float:
    lasting = _LASTING.get(kind)
    return 0.0 if lasting is None else round(random.uniform(*lasting), 3)
