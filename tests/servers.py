"""Finds server binaries for tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tools.servers import Server, find


def find_server(server: Server) -> Path:
    """Return the server's binary. If it is missing, the test fails in CI and is skipped elsewhere."""
    binary = find(server)
    if binary is not None:
        return binary
    message = f"{server.name} is not installed here; run: {server.how_to_install}"
    if os.environ.get("CI") == "true":
        pytest.fail(message)
    pytest.skip(message)
