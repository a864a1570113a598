"""The name of one job in the ledger."""

from __future__ import annotations

import msgspec


class JobKey(msgspec.Struct, frozen=True):
    """Names one job in the ledger: ids are unique within a queue only, since other programs may choose them."""

    tenant_id: str
    queue: str
    job_id: str
