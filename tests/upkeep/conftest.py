"""The apps and faults of the worker tests."""

from tests.worker.conftest import app as app
from tests.worker.conftest import both as both
from tests.worker.conftest import clock as clock
from tests.worker.conftest import faults as faults
from tests.worker.conftest import url as url
