"""For tests of your own: contexts for unit tests, inline and drain modes, a clock moved by hand.

The fixtures of the pytest plugin are `holdfast_app`, `holdfast_clock` and `holdfast_worker`. The engine contract needs
pytest and is imported from `holdfast.testing.contract`, not from here.
"""

from holdfast._platform import unsupported

if (_error := unsupported()) is not None:
    raise _error

from holdfast.guard.decisions import ApprovalInterrupt
from holdfast.testing.contexts import UnitContext, make_context
from holdfast.testing.inline import InMemoryWorker, ManualClock, drain, inline

__all__ = ["ApprovalInterrupt", "InMemoryWorker", "ManualClock", "UnitContext", "drain", "inline", "make_context"]
