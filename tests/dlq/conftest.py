"""The world of `tests.people`."""

from tests.people.conftest import alone as alone
from tests.people.conftest import world as world
