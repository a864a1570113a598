"""The behaviour that every engine must show, as a pytest suite that anyone can run on their own.

    from holdfast.testing.contract import EngineContract

    class TestMyEngine(EngineContract):
        @pytest.fixture
        async def harness(self): ...        # an `EngineHarness`

Needs pytest with pytest-asyncio in `auto` mode. Each test gets a store of its own from the harness, and
lets time pass through it: nothing here sleeps.
"""

from __future__ import annotations

from holdfast.testing.contract.endings import EndingContract
from holdfast.testing.contract.fairness import FairnessContract
from holdfast.testing.contract.harness import EngineHarness, Rig
from holdfast.testing.contract.intake import IntakeContract
from holdfast.testing.contract.leases import LeaseContract
from holdfast.testing.contract.ledger import LedgerContract
from holdfast.testing.contract.limits import IntakeLimitContract
from holdfast.testing.contract.operators import ControlContract, MoveContract
from holdfast.testing.contract.people import AnswerContract, OverviewContract, QueueControlContract
from holdfast.testing.contract.readers import FeedContract, ReaderContract
from holdfast.testing.contract.recovery import RecoveryContract
from holdfast.testing.contract.running_now import RunNowContract
from holdfast.testing.contract.waiting import WaitingContract


class EngineContract(
    IntakeContract,
    LeaseContract,
    EndingContract,
    WaitingContract,
    MoveContract,
    ControlContract,
    ReaderContract,
    FeedContract,
    LedgerContract,
    RecoveryContract,
    FairnessContract,
    QueueControlContract,
    IntakeLimitContract,
    AnswerContract,
    RunNowContract,
    OverviewContract,
):
    """All of it. Give it a `harness` fixture."""


__all__ = ["EngineContract", "EngineHarness", "Rig"]
