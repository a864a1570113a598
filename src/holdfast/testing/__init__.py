"""Helpers for testing applications: contexts for unit tests, inline and drain modes, a manual clock.

The pytest plugin has the fixtures `holdfast_app`, `holdfast_clock` and `holdfast_worker`. The engine contract needs
pytest; import it from `holdfast.testing.contract`.
"""

from holdfast._platform import unsupported_error

if (_error := unsupported_error()) is not None:
    raise _error

from holdfast.guard.decisions import ApprovalInterrupt
from holdfast.testing.contexts import UnitContext, make_context
from holdfast.testing.inline import InMemoryWorker, ManualClock, drain, inline

__all__ = ["ApprovalInterrupt", "InMemoryWorker", "ManualClock", "UnitContext", "drain", "inline", "make_context"]
