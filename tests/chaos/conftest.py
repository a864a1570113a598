"""What the tests of chaos runs share."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from holdfast.chaos.servers import PostgresServer


@pytest.fixture(scope="module")
def copied_postgres(postgres_files: Path) -> Iterator[None]:
    """Deployments of this process begin with a copy of a new PostgreSQL's files: to make them takes ten times as long.
    Those of other processes make their own."""

    def copy(server: PostgresServer) -> None:
        subprocess.run(["cp", "-a", str(postgres_files), str(server.data)], check=True)

    with patch.object(PostgresServer, "_initialise", copy):
        yield
