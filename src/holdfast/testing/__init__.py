"""For tests of your own: a clock moved by hand, inline and drain modes; the engine contract is in `.contract`.

The contract suites need pytest and are imported from `holdfast.testing.contract`, not from here.
"""

from holdfast._platform import unsupported

if (_error := unsupported()) is not None:
    raise _error

from holdfast.testing.clock import ManualClock
from holdfast.testing.inline import drain, inline

__all__ = ["ManualClock", "drain", "inline"]
