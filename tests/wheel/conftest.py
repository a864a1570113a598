"""Clean environments with the wheel, made once for a test run."""

from __future__ import annotations

import os

import pytest

from tests.wheel.environments import BASE, Environment, Environments


@pytest.fixture(scope="session")
def environments(tmp_path_factory: pytest.TempPathFactory) -> Environments:
    own = tmp_path_factory.getbasetemp()
    # The processes of a test run have folders of their own in one that they share.
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    return Environments(shared / "wheel-environments")


@pytest.fixture(scope="session")
def base(environments: Environments) -> Environment:
    """The wheel alone."""
    return environments.get(BASE)
