"""Makes the test process independent of how and where it was started.

A shell's background job inherits an ignored SIGINT, a service manager blocked signals, a developer's terminal its
`HOLDFAST_URL`, its width and its colours. Child processes inherit all of it in turn, so it is put right once, before
the first test is collected: in the controlling process and in each of pytest-xdist's.
"""

from __future__ import annotations

import os
import signal
from typing import Final

#: Signals that tests send to programs, which do not react to a signal that they inherited as ignored.
_SENT: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: What tests may read from outside: where servers are.
_KEPT_PREFIX: Final = "HOLDFAST_TEST_"
#: Prefixes of variables that choose a store, an account or an exporter.
_DROPPED_PREFIXES: Final = ("HOLDFAST_", "OTEL_", "PG", "AWS_")
#: Variables that change what programs print, or how Python runs them.
_DROPPED: Final = frozenset(
    {
        "CLICOLOR",
        "CLICOLOR_FORCE",
        "COLUMNS",
        "FORCE_COLOR",
        "LINES",
        "NO_COLOR",
        "PYTHONOPTIMIZE",
        "PYTHONWARNINGS",
        "SENTRY_DSN",
        "TTY_COMPATIBLE",
        "TTY_INTERACTIVE",
    }
)
#: Servers of the tests are reached directly, whatever proxy leads to the packages.
_DIRECT: Final = "127.0.0.1,localhost,::1"


def normalise() -> None:
    """Put signals and variables into the state that the tests are written for."""
    _reset_signals()
    _reset_variables()


def _reset_signals() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SENT)
    for number in _SENT:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    # An ignored SIGCHLD makes the kernel drop exit codes.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _reset_variables() -> None:
    for name in list(os.environ):
        dropped = name in _DROPPED or name.startswith(_DROPPED_PREFIXES)
        if dropped and not name.startswith(_KEPT_PREFIX):
            del os.environ[name]
    for name in ("NO_PROXY", "no_proxy"):
        os.environ[name] = ",".join(filter(None, (os.environ.get(name), _DIRECT)))
