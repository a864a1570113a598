"""Observability: counters, metrics, tracing, logs and redaction.

Public: `redact_value`.
"""

from typing import TYPE_CHECKING

from holdfast._exports import lazy_exports as _lazy_exports

if TYPE_CHECKING:
    from holdfast.observe.redact import redact_value

__all__ = ["redact_value"]

__getattr__ = _lazy_exports(
    __name__,
    {
        "redact_value": "holdfast.observe.redact",
    },
)
