"""Makes the test process independent of how and where it was started.

A background job of a shell inherits an ignored SIGINT, a service may inherit blocked signals, a terminal sets
`HOLDFAST_URL`, width and colours. Child processes inherit all of it, so it is reset once before the first test is
collected: in the controlling process and in each pytest-xdist worker.
"""

from __future__ import annotations

import os
import signal
from typing import Final

#: Signals that tests send to programs. A program that inherits one as ignored does not react to it.
_SENT: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: Prefix of variables that tests read: the URLs of servers.
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
#: Hosts of test servers: reached directly even if a proxy is set for package downloads.
_DIRECT: Final = "127.0.0.1,localhost,::1"


def normalise() -> None:
    """Reset signals and variables to the state that the tests expect."""
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
