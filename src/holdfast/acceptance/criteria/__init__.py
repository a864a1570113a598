"""The criteria, in the order in which they are run."""

from __future__ import annotations

from typing import Final

from holdfast.acceptance.criteria import leases, ledger, life, people, replays, servers, wire
from holdfast.acceptance.model import Criterion

#: Those that wait for a lease to be lost; they run beside the others, on queues of their own.
SLOW: Final[tuple[Criterion, ...]] = leases.CRITERIA

#: The last ones look at what the others have left.
CRITERIA: Final[tuple[Criterion, ...]] = (
    *servers.CRITERIA,
    *life.CRITERIA,
    *replays.CRITERIA,
    *people.CRITERIA,
    *wire.CRITERIA,
    *ledger.CRITERIA,
)

LAST: Final[tuple[Criterion, ...]] = ledger.LAST
