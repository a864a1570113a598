"""Operator actions on jobs, queues and messages, with permission checks and audit (D3–D6, H5, H6).

Public: `render_metrics`.
"""

from typing import TYPE_CHECKING

from holdfast._exports import lazy_exports as _lazy_exports

if TYPE_CHECKING:
    from holdfast.operations.metrics import render_metrics

__all__ = ["render_metrics"]

__getattr__ = _lazy_exports(
    __name__,
    {
        "render_metrics": "holdfast.operations.metrics",
    },
)
