"""Contract suite for engines: pytest tests that every implementation of the engine port must pass.

    from holdfast.testing.contract import EngineContract

    class TestMyEngine(EngineContract):
        @pytest.fixture
        async def harness(self): ...        # an `EngineHarness`

Needs pytest with pytest-asyncio in `auto` mode. The harness gives each test its own store and advances its clock; no
test sleeps.
"""

from __future__ import annotations

from holdfast.testing.contract.approvals import ApprovalContract, OperatorReadContract, QueueControlContract
from holdfast.testing.contract.concurrency import ConcurrencyContract
from holdfast.testing.contract.feed import FeedEventContract
from holdfast.testing.contract.harness import EngineHarness, Rig
from holdfast.testing.contract.intake import IntakeContract
from holdfast.testing.contract.leases import LeaseContract
from holdfast.testing.contract.operators import ControlContract, MoveContract
from holdfast.testing.contract.queue_limits import QueueLimitContract
from holdfast.testing.contract.reads import FeedContract, ReaderContract
from holdfast.testing.contract.recovery import RecoveryContract
from holdfast.testing.contract.scheduling import ExpediteContract, RetryContract
from holdfast.testing.contract.settlements import SettlementContract
from holdfast.testing.contract.tenancy import FairnessContract, IntakeLimitContract
from holdfast.testing.contract.worker_ids import WorkerIdContract


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
    ConcurrencyContract,
    QueueControlContract,
    IntakeLimitContract,
    QueueLimitContract,
    ApprovalContract,
    ExpediteContract,
    OperatorReadContract,
    WorkerIdContract,
):
    """The complete engine contract. Subclasses define a `harness` fixture."""


__all__ = ["EngineContract", "EngineHarness", "Rig"]
