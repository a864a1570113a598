"""Fixtures of the worker tests, for inline mode."""

from tests.worker.conftest import clock as clock
