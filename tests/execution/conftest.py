"""Fixtures of the worker tests, for single runs."""

from tests.worker.conftest import app as app
from tests.worker.conftest import both as both
from tests.worker.conftest import clock as clock
from tests.worker.conftest import url as url
