"""The ledger: the history of every job, queries on it, and the effects and steps of tasks.

Public: the filters and rows of `app.ledger.queries`, and `verify_ledger`. Loaded at first use: they load SQLAlchemy.
"""

from typing import TYPE_CHECKING

from holdfast._exports import lazy_exports as _lazy_exports

if TYPE_CHECKING:
    from holdfast.ledger.queries.job_list import JobFilter
    from holdfast.ledger.queries.operator_filters import ApprovalFilter, AuditFilter, DeadLetterFilter
    from holdfast.ledger.queries.records import JobRow
    from holdfast.ledger.verify import verify_ledger

__all__ = ["ApprovalFilter", "AuditFilter", "DeadLetterFilter", "JobFilter", "JobRow", "verify_ledger"]

__getattr__ = _lazy_exports(
    __name__,
    {
        "ApprovalFilter": "holdfast.ledger.queries.operator_filters",
        "AuditFilter": "holdfast.ledger.queries.operator_filters",
        "DeadLetterFilter": "holdfast.ledger.queries.operator_filters",
        "JobFilter": "holdfast.ledger.queries.job_list",
        "JobRow": "holdfast.ledger.queries.records",
        "verify_ledger": "holdfast.ledger.verify",
    },
)
