"""A shell per test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.harness import SAMPLE_APP, Shell, environment


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    """A folder with `sample.py` in it; leases are short, so that jobs of a dead worker are reclaimed soon."""
    (tmp_path / "sample.py").write_text(SAMPLE_APP)
    more = {
        "HOLDFAST_VISIBILITY_TIMEOUT_S": "2",
        "HOLDFAST_HEARTBEAT_INTERVAL_S": "0.5",
        "HOLDFAST_RECLAIM_INTERVAL_S": "0.2",
    }
    return Shell(tmp_path, environment(tmp_path, **more))
