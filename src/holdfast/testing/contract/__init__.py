"""The behaviour that every engine must show, as a pytest suite that anyone can run on their own.

    from holdfast.testing.contract import EngineContract

    class TestMyEngine(EngineContract):
        @pytest.fixture
        async def harness(self): ...        # an `EngineHarness`

Needs pytest with pytest-asyncio in `auto` mode. Each test gets a store of its own from the harness, and
lets time pass through it: nothing here sleeps.
"""

from __future__ import annotations

from holdfast.testing.contract.approvals import ApprovalContract, OperatorReadContract, QueueControlContract
from holdfast.testing.contract.feed import FeedEventContract
from holdfast.testing.contract.harness import EngineHarness, Rig
from holdfast.testing.contract.intake import IntakeContract
from holdfast.testing.contract.leases import LeaseContract
from holdfast.testing.contract.operators import ControlContract, MoveContract
from holdfast.testing.contract.reads import FeedContract, ReaderContract
from holdfast.testing.contract.recovery import RecoveryContract
from holdfast.testing.contract.scheduling import ExpediteContract, RetryContract
from holdfast.testing.contract.settlements import SettlementContract
from holdfast.testing.contract.tenancy import FairnessContract, IntakeLimitContract


class EngineContract(
    IntakeContract,
    LeaseContract,
    SettlementContract,
    RetryContract,
    MoveContract,
    ControlContract,
    ReaderContract,
    FeedContract,
    FeedEventContract,
    RecoveryContract,
    FairnessContract,
    QueueControlContract,
    IntakeLimitContract,
    ApprovalContract,
    ExpediteContract,
    OperatorReadContract,
):
    """All of it. Give it a `harness` fixture."""


__all__ = ["EngineContract", "EngineHarness", "Rig"]
