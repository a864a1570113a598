"""Platform check. Imports no other module of holdfast, because it runs before they are imported."""

from __future__ import annotations

import sys
from typing import Final

WINDOWS: Final = (
    "holdfast does not run on Windows (it needs fcntl and POSIX signals); "
    "use Linux, for example in WSL 2 or a container"
)


def unsupported_error() -> ImportError | None:
    """The error to raise on Windows, instead of one that names a module of the standard library."""
    return ImportError(WINDOWS) if sys.platform == "win32" else None
