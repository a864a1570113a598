"""The engine port and its two adapters, Redis and SQLite.

Public: `Engine`, the port, for further adapters.
"""

from typing import TYPE_CHECKING

from holdfast._exports import lazy_exports as _lazy_exports

if TYPE_CHECKING:
    from holdfast.engine.port import Engine

__all__ = ["Engine"]

__getattr__ = _lazy_exports(
    __name__,
    {
        "Engine": "holdfast.engine.port",
    },
)
