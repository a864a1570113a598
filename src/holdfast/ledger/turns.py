"""What the stores of effects agree on: keys in a batch take turns, and who holds a key."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from holdfast.ledger.port import Outcome

T = TypeVar("T")


def turns(items: Sequence[T], key: Callable[[T], tuple[str, str]]) -> list[list[int]]:
    """Numbers of the items, in turns: no key twice in a turn. A second wish for a key comes after the first."""
    made: list[list[int]] = []
    seen: dict[tuple[str, str], int] = {}
    for number, item in enumerate(items):
        turn = seen[key(item)] = seen.get(key(item), -1) + 1
        if turn == len(made):
            made.append([])
        made[turn].append(number)
    return made


def is_held(outcome: Outcome, token: str | None) -> bool:
    """Whether an outcome is about the reservation that has the key now. What is to be free and is gone, is free."""
    return outcome.state is None if token is None else token == outcome.token
