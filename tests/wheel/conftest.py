"""Clean environments with the wheel, created once for a test run."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tests.wheel.environments import BASE, Environment, Environments


@pytest.fixture(scope="session")
def environments(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Environments]:
    own = tmp_path_factory.getbasetemp()
    # Each process of a test run has its own folder below a shared one.
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    folder = shared / "wheel-environments"
    with (shared / "wheel-environments.users").open("w") as users:
        fcntl.flock(users, fcntl.LOCK_SH)
        yield Environments(folder)
        # The last user removes them: hundreds of megabytes that pytest would keep for three runs.
        with suppress(BlockingIOError):
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)


@pytest.fixture(scope="session")
def base(environments: Environments) -> Environment:
    """The wheel alone."""
    return environments.get(BASE)
