"""The ledger's port for once-only effects and steps, and the rules its stores share.

Methods take batches, so that concurrent callers share a commit. All raise `LedgerUnavailable` when the store does not
answer, and may then be called again with the same arguments. `rounds` splits a batch so that no key occurs twice in a
round; `holds_key` decides whether an outcome belongs to the key's present reservation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Protocol, TypeVar

import msgspec

from holdfast.core.job import JobKey as JobKey

# Effects and steps ---------------------------------------------------------------------------------


class EffectState(StrEnum):
    """State of an effect key (requirement E2)."""

    RESERVED = "reserved"
    DONE = "done"
    IN_DOUBT = "in_doubt"


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """A request to run an effect under a key, and the attempt that makes it."""

    tenant_id: str
    key: str
    function: str
    fingerprint: str
    token: str
    queue: str
    job_id: str
    attempt: int
    worker: str
    #: Replace this reservation, which is in doubt or whose holder is lost, instead of making a new one.
    replaces_token: str = ""


class EffectKey(msgspec.Struct, frozen=True, kw_only=True):
    """The row of a key. The caller holds it if the token is the one in its reservation."""

    state: EffectState
    token: str
    value: bytes | None
    function: str
    fingerprint: str
    queue: str
    job_id: str
    attempt: int
    worker: str
    reason: str
    updated_at_ms: int


class EffectOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How an effect ended: done with a value, in doubt, or not done (the key is released).

    `token` is that of the reservation.
    """

    tenant_id: str
    key: str
    token: str
    state: EffectState | None
    value: bytes | None = None
    reason: str = ""
    #: A `done` key may be used again after this long; None: never.
    ttl_ms: int | None = None


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint. `position` counts the job's steps from 1 in the order of its code."""

    key: JobKey
    position: int
    name: str
    result: bytes
    attempt: int


class EffectStore(Protocol):
    """Reservations and checkpoints. Every method takes a batch and is one transaction."""

    async def reserve(self, reservations: Sequence[Reservation]) -> list[EffectKey]:
        """Reserve keys and return each key's row.

        New keys, and done keys that have expired, become the caller's.
        """
        ...

    async def conclude(self, outcomes: Sequence[EffectOutcome]) -> list[bool]:
        """Record outcomes; return whether each still held its key.

        False: the key was reserved again meanwhile, so the effect may have happened twice.
        """
        ...

    async def get(self, keys: Sequence[tuple[str, str]]) -> list[EffectKey | None]:
        """Return the rows of `(tenant_id, key)`."""
        ...

    async def steps(self, jobs: Sequence[JobKey]) -> list[list[Step]]:
        """Return each job's recorded steps, by position."""
        ...

    async def record_steps(self, steps: Sequence[Step]) -> list[Step]:
        """Record steps and return each as it is recorded now: the first to record a position wins."""
        ...


T = TypeVar("T")


def rounds(items: Sequence[T], key: Callable[[T], tuple[str, str]]) -> list[list[int]]:
    """Split item indexes into rounds in which no key occurs twice; a key's items keep their order."""
    batches: list[list[int]] = []
    uses: dict[tuple[str, str], int] = {}
    for index, item in enumerate(items):
        nth = uses[key(item)] = uses.get(key(item), -1) + 1
        if nth == len(batches):
            batches.append([])
        batches[nth].append(index)
    return batches


def holds_key(outcome: EffectOutcome, token: str | None) -> bool:
    """Whether an outcome belongs to the key's present reservation.

    Releasing an absent key succeeds.
    """
    return outcome.state is None if token is None else token == outcome.token
