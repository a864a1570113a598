"""Names of processes in stores and logs."""

from __future__ import annotations

import os
import socket
from uuid import uuid4


def new_identity(name: str = "", *, role: str = "") -> str:
    """A name that no other start of any process has: `name`, or else host and process, and a random end.

    Make it when the work starts, never at import: what a fork copies is not unique.
    """
    parts = (role, name or f"{socket.gethostname()}-{os.getpid()}", uuid4().hex[:8])
    return "-".join(part for part in parts if part)
